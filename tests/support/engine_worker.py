"""One rank of a trainer engine without the loop; :mod:`support.forked_ranks` runs its ``main`` with a plan's path.

The plan is a list of :class:`Task`; rank 0 writes ``NAME.json`` and ``NAME.safetensors`` of each into its directory.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.batching import build_step
from inflight_runtime.trainer.contract import EngineError, TrainerEngine
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.losses import LossSums
from inflight_runtime.trainer.packing import MicroBatch, attention_cost, plan_ranks
from inflight_runtime.trainer.ranks import Team, forward_backward
from support.trainer_fakes import random_group, step_batch

SGD_RATE = 0.3


@dataclass(frozen=True)
class Task:
    """Steps ``first`` to ``last`` on the data that belongs to each.

    Attributes:
        name: of the files that are written.
        config: JSON of the trainer's config.
        resume: checkpoint directory to start from.
        sgd: plain SGD in place of AdamW.
        save: directory of the checkpoint that is written after the last step.
        refused: the engine must refuse to begin; each rank writes what it says to ``NAME.rank-R.txt``.
    """

    name: str
    config: str
    first: int = 1
    last: int = 5
    resume: str | None = None
    sgd: bool = False
    save: str | None = None
    refused: bool = False


def step_plan(step: int, config: TrainerConfig, ranks: int) -> list[list[MicroBatch]]:
    """Groups of very different lengths, so that the micro-batches are unequal and one is missing on the last rank."""
    rng = np.random.default_rng([7, step])
    sizes = ((40, 30), (12, 20), (6, 3))
    groups = [
        random_group(rng, step * 3 + index, prompt=prompt, longest=longest, version=(1, step - 1))
        for index, (prompt, longest) in enumerate(sizes)
    ]
    data = build_step(step_batch(step, groups), config)
    return plan_ranks(data.sequences, config.micro_batch_tokens, attention_cost(64), ranks)


def run_task(task: Task, engine: TrainerEngine, team: Team, directory: Path) -> None:
    """Train and write what came of it."""
    config = TrainerConfig.model_validate_json(task.config)
    try:
        engine.init(config, Path(task.resume) if task.resume else None, task.first - 1)
    except EngineError as error:
        if not task.refused:
            raise
        (directory / f"{task.name}.rank-{team.rank}.txt").write_text(str(error))
        return
    assert not task.refused
    if task.sgd:
        held: Any = engine
        held.optimizer = torch.optim.SGD(held.parameters, lr=SGD_RATE)
    record: dict[str, list[float]] = {"loss": [], "grad_norm": [], "tokens": [], "micro_batches": []}
    for step in range(task.first, task.last + 1):
        plan = step_plan(step, config, team.size)
        total = forward_backward(engine, plan[team.rank], config.loss)
        assert total is not None
        sums = LossSums.of(team.sum(total))
        stats = engine.optimizer_step()
        assert stats.applied
        record["loss"].append(sums.loss)
        record["tokens"].append(sums.tokens)
        record["grad_norm"].append(stats.grad_norm)
        record["micro_batches"].append(sum(len(batch.targets) > 0 for part in plan for batch in part))
    exported = {name: tensor.cpu().clone() for name, tensor in engine.export_weights()}
    if task.save:
        target = Path(task.save)
        target.mkdir(parents=True, exist_ok=True)
        team.attempt(lambda: engine.save(target))
    if team.rank == 0:
        save_file(exported, directory / f"{task.name}.safetensors", metadata={"format": "pt"})
        (directory / f"{task.name}.json").write_text(json.dumps(record))


def write_plan(path: Path, engine: str, tasks: list[Task]) -> None:
    path.write_text(json.dumps({"engine": engine, "tasks": [asdict(task) for task in tasks]}))


def main() -> None:
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    team = Team.join("cpu", int(os.environ["WORLD_SIZE"]))
    for fields in plan["tasks"]:
        engine = make_engine(plan["engine"])
        task = Task(**fields)
        run_task(task, engine, team, path.parent)
        if not task.refused:
            engine.close()
    if team.size > 1:
        dist.barrier()
