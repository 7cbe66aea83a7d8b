"""One rank of a measured trainer engine: ``torchrun benchmarks/trainer_rank.py PLAN.json``, see trainer_engines.py.

It loads the model, trains some steps as the trainer's loop does, exports and saves, and writes ``rank-N.json`` beside
the plan: seconds of each part, and the most memory that the process had in each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_data import Shape, make_config, make_data
from torch import Tensor

from inflight_runtime.trainer.contract import TokenStats, TrainerEngine
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.losses import LossSums
from inflight_runtime.trainer.packing import MicroBatch, attention_cost, plan_ranks
from inflight_runtime.trainer.ranks import Team, forward_backward
from inflight_runtime.types import Version
from inflight_runtime.weights.snapshot import SnapshotBuffers

RESET_PEAK = "5"
"""What /proc/self/clear_refs takes to forget the most memory so far."""


class Watch:
    """Adds up the seconds of each part until they are taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class WatchedEngine:
    """An engine for ``forward_backward`` whose two parts are timed."""

    def __init__(self, engine: TrainerEngine, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch

    def forward(self, batch: MicroBatch) -> TokenStats:
        with self._watch.part("forward"):
            return self._engine.forward(batch)

    def backward(self, loss: Tensor, last: bool) -> None:
        with self._watch.part("backward"):
            self._engine.backward(loss, last)


def peak_rss_mb(work: Callable[[], None]) -> float:
    """The most memory of this process while it works, in units of 10^6 bytes."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    work()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError("/proc/self/status has no VmHWM")


def measure(plan: dict[str, Any], directory: Path) -> None:
    """Do what the plan says and write what it took."""
    shape = Shape(**plan["shape"])
    config = make_config(directory, Path(plan["model"]), shape, **plan["config"])
    team = Team.join("cpu", int(os.environ["WORLD_SIZE"]))
    engine: Any = make_engine(config.engine)
    watch = Watch()
    result: dict[str, Any] = {"steps": [], "export": [], "peak_rss_mb": {}}

    def together(name: str) -> contextlib.AbstractContextManager[None]:
        if team.size > 1:
            dist.barrier()
        return watch.part(name)

    def load() -> None:
        with together("load"):
            info = engine.init(config, None, 0)
        result["parameters"], result["load"] = info.parameters, watch.take()["load"]
        result["vocab"], result["hidden"] = info.vocab_size, info.hidden_size

    def train() -> None:
        for step in range(1, plan["warm_up"] + plan["steps"] + 1):
            data = make_data(shape, config, result["vocab"], seed=step)
            mine = plan_ranks(data.sequences, config.micro_batch_tokens, attention_cost(result["hidden"]), team.size)
            cpu = time.process_time()
            with together("step"):
                total = forward_backward(WatchedEngine(engine, watch), mine[team.rank], config.loss)
                assert total is not None
                loss = LossSums.of(team.sum(total)).loss
                with watch.part("optimizer"):
                    stats = engine.optimizer_step()
            seconds = {**watch.take(), "cpu": time.process_time() - cpu}
            if step == 1:
                result["loss"], result["grad_norm"] = loss, stats.grad_norm
            if step > plan["warm_up"]:
                result["steps"].append(seconds)

    def export() -> None:
        buffers = SnapshotBuffers()
        for step in range(plan["exports"] + 1):
            with together("export"):
                if team.rank == 0:
                    buffers.capture(Version(1, step), engine.export_weights(), config.model.dtype)
                else:
                    for _ in engine.export_weights():
                        pass
            if step:  # the first one finds the snapshot's memory
                result["export"].append(watch.seconds["export"])
            watch.take()

    def save() -> None:
        target = directory / "checkpoint"
        target.mkdir(exist_ok=True)
        with together("save"):
            engine.save(target)
            if team.size > 1:
                dist.barrier()
        result["save"] = watch.take()["save"]

    for part in (load, train, export, save):
        result["peak_rss_mb"][part.__name__] = peak_rss_mb(part)
    result["threads"] = torch.get_num_threads()
    (directory / f"rank-{team.rank}.json").write_text(json.dumps(result))
    if team.size > 1:
        dist.barrier()


if __name__ == "__main__":
    code = 0
    try:
        path = Path(sys.argv[1])
        measure(json.loads(path.read_text()), path.parent)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # distributed checkpoints leave threads that may abort a process at its end
