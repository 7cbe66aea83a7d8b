"""Groups, configs and stand-ins for the coordinator and the publisher, for tests of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.config.roles import CheckpointConfig, ModelFiles, TrainerConfig
from inflight_runtime.coordinator.client import FencedError, StepBatch
from inflight_runtime.protocol import (
    CheckpointDurable,
    FailRequest,
    MembersReply,
    RunState,
    StepCommit,
    TrainerStart,
    TrainerStarted,
    VersionField,
)
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.loop import Trainer
from inflight_runtime.trainer.remote import Remote
from inflight_runtime.trainer.signals import StopRequest
from inflight_runtime.types import Attempt, Group, Segment, Span, make_segment
from inflight_runtime.weights.snapshot import Snapshot


def trainer_config(directory: Path, model: Path, **changes: Any) -> TrainerConfig:
    """A small job: 2 groups of 4 in a step."""
    fields: dict[str, Any] = {
        "job": "test",
        "coordinator_url": "http://127.0.0.1:1",
        "token_file": directory / "token",
        "model": ModelFiles(path=str(model), tokenizer=str(model), max_length=256),
        "steps": 4,
        "groups_per_step": 2,
        "group_size": 4,
        "max_staleness": 4,
        "max_tokens": 8,
        "micro_batch_tokens": 512,
        "checkpoint": CheckpointConfig(dir=directory / "checkpoints"),
        "log_dir": directory / "logs",
    }
    return TrainerConfig(**(fields | changes))


def sampled_segment(
    ids: Sequence[int], logprobs: Sequence[float] | None = None, *, version: tuple[int, int] = (1, 0)
) -> Segment:
    """A segment whose every token was sampled under one version."""
    count = len(ids)
    return make_segment(ids, [True] * count, logprobs or [-2.0] * count, [Span(*version, 0, count, "server", "boot")])


def random_group(
    rng: np.random.Generator,
    group_id: int,
    *,
    attempts: int = 4,
    prompt: int = 12,
    longest: int = 8,
    vocab: int = 264,
    version: tuple[int, int] = (1, 0),
) -> Group:
    """A group with random answers and rewards."""
    return Group(
        group_id=group_id,
        fence=1,
        problem_index=group_id,
        prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
        attempts=tuple(
            Attempt(
                segments=(
                    sampled_segment(
                        rng.integers(0, vocab, size).tolist(),
                        (-rng.random(size) * 4 - 1).tolist(),
                        version=version,
                    ),
                ),
                reward=float(rng.random()),
                parts={"length": float(size)},
                text=f"answer {group_id}.{number}",
            )
            for number, size in enumerate(rng.integers(1, longest + 1, attempts))
        ),
        prompt_text="question",
    )


def step_batch(step: int, groups: Sequence[Group], *, planned: int | None = None) -> StepBatch:
    return StepBatch(step, step - 1, planned or len(groups), {}, list(groups))


def random_batches(seed: int, groups: int = 2, attempts: int = 4) -> Callable[[int], list[Group]]:
    """The same groups for a step whenever it is asked for."""

    def groups_of(step: int) -> list[Group]:
        rng = np.random.default_rng([seed, step])
        return [
            random_group(rng, step * groups + index, attempts=attempts, version=(1, max(0, step - 1)))
            for index in range(groups)
        ]

    return groups_of


@dataclass
class FakeCoordinator:
    """Answers the trainer from memory; ``batches`` makes the groups of a step, ``None``: not there yet."""

    batches: Callable[[int], list[Group] | None]
    steps: int = 4
    planned: int = 2
    epoch: int = 0
    resumed_at: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    commits: dict[int, dict[str, float]] = field(default_factory=dict)
    durable: list[CheckpointDurable] = field(default_factory=list)
    failures: list[FailRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    taken_over_at: int | None = None

    async def start_trainer(self, request: TrainerStart) -> TrainerStarted:
        self.epoch += 1
        self.resumed_at.append(request.resume_step)
        return TrainerStarted(epoch=self.epoch, steps=self.steps)

    async def batch(self, step: int, epoch: int, wait_seconds: float) -> StepBatch | None:
        self.asked.append(step)
        if self.taken_over_at is not None and step >= self.taken_over_at:
            raise FencedError(409, f"epoch {epoch} is over")
        groups = self.batches(step)
        if groups is None:
            await asyncio.sleep(min(wait_seconds, 0.02))
            return None
        return step_batch(step, groups, planned=self.planned)

    async def commit(self, step: int, request: StepCommit) -> None:
        self.commits[step] = StepCommit.model_validate_json(request.model_dump_json()).metrics
        self.events.append(f"commit {step}")

    async def checkpoint(self, request: CheckpointDurable) -> None:
        self.durable.append(request)
        self.events.append(f"durable {request.step}")

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        return MembersReply(
            revision=0, epoch=self.epoch, policy_version=VersionField(epoch=0, step=0), finished=False, members=[]
        )

    async def state(self) -> RunState:
        raise AssertionError("not asked for in less than a minute")

    async def fail(self, request: FailRequest) -> None:
        self.failures.append(request)


@dataclass
class FakePublisher:
    """Keeps every snapshot."""

    snapshots: list[Snapshot] = field(default_factory=list)
    closed: bool = False

    async def publish(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class TrainerRun:
    """A trainer over fakes; ``run()`` runs it in this thread."""

    config: TrainerConfig
    coordinator: FakeCoordinator
    publisher: FakePublisher = field(default_factory=FakePublisher)
    stop: StopRequest = field(default_factory=StopRequest)

    def run(self) -> Trainer:
        background = BackgroundLoop("test-trainer")
        trainer = Trainer(
            self.config,
            make_engine("single"),
            Remote(background, self.coordinator),
            lambda epoch, log: self.publisher,
            self.stop,
        )
        try:
            trainer.run()
        finally:
            background.close()
        return trainer
