"""A step to train on: random answers of a given shape, and the config that goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inflight_runtime.config.roles import CheckpointConfig, LossConfig, ModelFiles, TrainerConfig
from inflight_runtime.coordinator.client import StepBatch
from inflight_runtime.trainer.batching import StepData, build_step
from inflight_runtime.types import Attempt, Group, Span, make_segment


@dataclass(frozen=True)
class Shape:
    """Of a step.

    Attributes:
        groups: prompts in a step.
        attempts: answers to each.
        prompt: tokens of a prompt.
        answers: shortest and longest answer, in tokens.
    """

    groups: int
    attempts: int
    prompt: int
    answers: tuple[int, int]


def make_config(directory: Path, model: Path, shape: Shape, **changes: Any) -> TrainerConfig:
    """A trainer's config for steps of this shape; nothing is sent anywhere."""
    fields: dict[str, Any] = {
        "job": "benchmark",
        "coordinator_url": "http://127.0.0.1:1",
        "token_file": directory / "token",
        "model": ModelFiles(path=str(model), tokenizer=str(model), max_length=1024),
        "steps": 1,
        "groups_per_step": shape.groups,
        "group_size": shape.attempts,
        "max_staleness": 4,
        "max_tokens": shape.answers[1],
        "micro_batch_tokens": 8192,
        "loss": LossConfig(is_cap=None),
        "checkpoint": CheckpointConfig(dir=directory / "checkpoints"),
        "log_dir": directory / "logs",
    }
    return TrainerConfig(**(fields | changes))


def make_data(shape: Shape, config: TrainerConfig, vocab: int, seed: int = 0) -> StepData:
    """Random answers: no two attempts share more than the prompt, the worst case for prefix trees."""
    rng = np.random.default_rng(seed)

    def attempt(number: int) -> Attempt:
        size = int(rng.integers(shape.answers[0], shape.answers[1] + 1))
        ids = rng.integers(0, vocab, size).tolist()
        span = Span(1, 0, 0, size, "s", "b")
        return Attempt((make_segment(ids, [True] * size, [-2.0] * size, [span]),), number / shape.attempts)

    groups = [
        Group(
            group, 1, group, rng.integers(0, vocab, shape.prompt).astype(np.int32),
            tuple(map(attempt, range(shape.attempts))),
        )
        for group in range(shape.groups)
    ]  # fmt: skip
    return build_step(StepBatch(1, 0, shape.groups, {}, groups), config)
