"""The trainer's whole loop on several ranks over a fake coordinator: ``torchrun -m support.loop_worker PLAN.json``.

The plan is a list of :class:`Scenario`, done one after the other by the same processes. What goes wrong in one is its
list of :class:`Mishap`; rank 0 writes ``NAME.json`` and each rank ``NAME.rank-N.json`` beside the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer import ranks
from inflight_runtime.trainer.checkpoint import CheckpointStore
from inflight_runtime.trainer.contract import EngineError, EngineInfo, StepStats, TokenStats, TrainerEngine
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.loop import Trainer
from inflight_runtime.trainer.manifest import CheckpointError, read_checkpoint
from inflight_runtime.trainer.packing import MicroBatch
from inflight_runtime.trainer.ranks import Team, follow
from inflight_runtime.trainer.remote import Remote
from inflight_runtime.trainer.signals import StopRequest
from inflight_runtime.types import Group
from support.torchrun import end_with
from support.trainer_fakes import FakeCoordinator, FakePublisher, random_batches

FILLER: Final = "filler"
WAIT_S: Final = 60.0
CUTS: Final = 10
"""Cut-offs at least."""
Kind = Literal["full", "no room", "elsewhere", "signal", "nan gradient", "inf gradient", "nan loss"]


@dataclass(frozen=True)
class Mishap:
    """What happens to one rank in one step.

    ``full``: the disk under the run fills up while the checkpoint is written, but for ``size`` bytes.
    ``no room``: this rank alone finds room for ``size`` bytes in each file of the checkpoint.
    ``signal``: SIGTERM in the middle of ``at``, twice; ``wait``: while there is no batch for this step.
    ``elsewhere``: what this rank writes of the checkpoint is not seen by the others.
    ``nan gradient``, ``inf gradient``, ``nan loss``: of the rank's first micro-batch.
    """

    kind: Kind
    step: int
    rank: int = 0
    at: Literal["forward", "save", "wait"] = "forward"
    size: int = 0


@dataclass(frozen=True)
class Scenario:
    """One life of a trainer.

    Attributes:
        name: of the files that are written.
        config: JSON of the trainer's config.
        epoch: of the lives before it.
        mishaps: what happens.
        cut: before it starts, every file of the newest checkpoint is cut off at a random byte, one after the other.
        graft: before it starts, the checkpoint that ``resume_from`` names is put together of these two, the model of
            the first and the rest of the second.
    """

    name: str
    config: str
    epoch: int = 0
    mishaps: Sequence[Mishap] = ()
    cut: int | None = None
    graft: tuple[str, str] | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Scenario:
        return cls(**fields | {"mishaps": [Mishap(**mishap) for mishap in fields["mishaps"]]})


@dataclass
class Stage:
    """An engine to which the scenario's mishaps happen."""

    engine: TrainerEngine
    mishaps: Sequence[Mishap]
    disk: Path
    exported: list[str] = field(default_factory=list)
    step: int = 0
    fresh: bool = True

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        self.step = step
        return self.engine.init(config, resume, step)

    def forward(self, batch: MicroBatch) -> TokenStats:
        for _ in self._now("signal", "forward"):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        stats = self.engine.forward(batch)
        if self.fresh:
            self.fresh = False
            for kind, factor in (("nan gradient", math.nan), ("inf gradient", math.inf)):
                for _ in self._now(kind):
                    stats.logprobs.register_hook(lambda gradient, factor=factor: gradient * factor)
            for _ in self._now("nan loss"):
                stats = dataclasses.replace(stats, logprobs=stats.logprobs * math.nan)
        return stats

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss, last)

    def optimizer_step(self, *, skip: bool = False) -> StepStats:
        self.step, self.fresh = self.step + 1, True
        return self.engine.optimizer_step(skip=skip)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        digest = hashlib.sha256()
        for name, tensor in self.engine.export_weights():
            digest.update(name.encode() + tensor.float().cpu().numpy().tobytes())
            yield name, tensor
        self.exported.append(digest.hexdigest())

    def save(self, directory: Path) -> None:
        with contextlib.ExitStack() as stack:
            for mishap in self._now("full", "save"):
                stack.enter_context(filled(self.disk, mishap.size))
            for mishap in self._now("no room", "save"):
                stack.enter_context(no_room(mishap.size))
            for _ in self._now("signal", "save"):
                os.kill(os.getpid(), signal.SIGTERM)
            for _ in self._now("elsewhere", "save"):
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.engine.save(directory)
            for _ in self._now("signal", "save"):
                os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        self.engine.close()

    def _now(self, kind: str, at: str = "forward") -> list[Mishap]:
        step = self.step if at == "save" else self.step + 1
        return [mishap for mishap in self.mishaps if (mishap.kind, mishap.at, mishap.step) == (kind, at, step)]


@contextlib.contextmanager
def filled(directory: Path, left: int) -> Iterator[None]:
    """Use the disk up, but for some bytes."""
    filler = directory / FILLER
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - left)
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_room(size: int) -> Iterator[None]:
    """Writing beyond ``size`` bytes of a file fails in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cut_everywhere(store: CheckpointStore, seed: int, said: list[str]) -> list[tuple[str, bool]]:
    """Cut each file of the newest checkpoint off; of each: its name, and whether it was passed over by that name."""
    *_, older, newest = store.steps()
    path = store.directory / f"step-{newest:08d}"
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rng = random.Random(seed)
    rng.shuffle(files)
    found = []
    for number in range(count := max(CUTS, len(files))):
        victim = files[number % len(files)]
        content = victim.read_bytes()
        os.truncate(victim, rng.randrange(len(content)))
        said.clear()
        taken = store.newest_whole()
        named = any(f"{path}: {victim.relative_to(path)} " in line for line in said)
        found.append((victim.relative_to(path).as_posix(), named and taken is not None and taken.step == older))
        if number < count - 1:
            victim.write_bytes(content)
    return found


def graft(config: TrainerConfig, parts: tuple[str, str]) -> None:
    """A whole checkpoint whose model and optimizer are of different ones."""
    target = config.checkpoint.resume_from
    assert target is not None

    def write(directory: Path) -> None:
        shutil.copytree(parts[1], directory, dirs_exist_ok=True)
        (directory / "runtime.json").unlink()
        shutil.rmtree(directory / "model")
        shutil.copytree(Path(parts[0]) / "model", directory / "model")

    CheckpointStore(target, config.job, 1).save(1, write, None)


def run(scenario: Scenario, team: Team, results: Path, said: list[str]) -> None:
    """Do one scenario and write what came of it."""
    config = TrainerConfig.model_validate_json(scenario.config)
    stop = StopRequest(1e6)  # this process lives on
    stop.install()
    waiting = results / f"{scenario.name}.waiting"
    if any(mishap.at == "wait" and mishap.rank == team.rank for mishap in scenario.mishaps):
        threading.Thread(target=signal_twice_when, args=(waiting,), daemon=True).start()
    stage = Stage(make_engine(config.engine), [m for m in scenario.mishaps if m.rank == team.rank], config.log_dir)
    said.clear()
    record: dict[str, Any] = {"error": None}
    if team.rank:
        try:
            record["code"] = follow(config, stage, team, stop)
        except EngineError as error:
            record["error"] = describe(error)
            assert team.hear().kind == "end"
            team.leave()
    else:
        if scenario.graft:
            graft(config, scenario.graft)
        if scenario.cut is not None:
            store = CheckpointStore(config.checkpoint.dir, config.job, config.checkpoint.keep)
            record["cuts"] = cut_everywhere(store, scenario.cut, said)
        record |= lead(scenario, stage, team, stop, waiting)
        record["log"] = list(said)
        team.end(0)
    record |= {"exported": stage.exported, "signal": stop.signum}
    name = scenario.name if team.rank == 0 else f"{scenario.name}.rank-{team.rank}"
    (results / f"{name}.json").write_text(json.dumps(record))


def signal_twice_when(waiting: Path) -> None:
    """SIGTERM to this process once a file is there."""
    deadline = time.monotonic() + WAIT_S
    while not waiting.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)


def lead(scenario: Scenario, stage: Stage, team: Team, stop: StopRequest, waiting: Path) -> dict[str, Any]:
    """Rank 0's part; returns what is to be known of it."""
    config = TrainerConfig.model_validate_json(scenario.config)
    groups = random_batches(3, config.groups_per_step)
    late = {mishap.step for mishap in scenario.mishaps if mishap.at == "wait"}

    def batches(step: int) -> list[Group] | None:
        if step in late:
            waiting.touch()
            return None
        return groups(step)

    coordinator = FakeCoordinator(batches, config.steps, config.groups_per_step, epoch=scenario.epoch)
    publisher = FakePublisher()
    background = BackgroundLoop("test-trainer")
    trainer = Trainer(config, stage, Remote(background, coordinator), lambda *_: publisher, stop, team=team)
    error = None
    try:
        trainer.run()
    except Exception as caught:
        error = describe(caught)
    finally:
        background.close()
    store = trainer.checkpoints
    return {
        "error": error,
        "step": trainer.step,
        "resumed_at": coordinator.resumed_at,
        "commits": coordinator.commits,
        "durable": [(request.step, request.oldest_step) for request in coordinator.durable],
        "failures": [request.reason for request in coordinator.failures],
        "names": sorted(path.name for path in store.directory.iterdir()) if store.directory.exists() else [],
        "whole": [step for step in store.steps() if is_whole(store.directory / f"step-{step:08d}")],
        "metrics": [json.loads(line) for line in read(config.log_dir / "metrics.jsonl").splitlines()],
        "samples": sorted(path.name for path in config.log_dir.glob("not-finite*")),
    }


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Said(logging.Handler):
    """Keeps what is logged, as it is read."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def main() -> None:
    plan = Path(sys.argv[1])
    ranks.POLL_S = 0.05
    said: list[str] = []
    logging.basicConfig(level=logging.INFO, handlers=[Said(said), logging.StreamHandler(sys.stderr)])
    team = Team.join("cpu", int(os.environ.get("WORLD_SIZE", "1")))
    for fields in json.loads(plan.read_text()):
        run(Scenario.of(fields), team, plan.parent, said)
        torch.manual_seed(0)


if __name__ == "__main__":
    end_with(main)
