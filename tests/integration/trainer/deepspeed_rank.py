"""One rank of test_deepspeed.py: trains a few steps on its share of the micro-batches and writes what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.batching import build_step
from inflight_runtime.trainer.contract import TrainerEngine
from inflight_runtime.trainer.engines import deepspeed, make_engine
from inflight_runtime.trainer.losses import policy_loss
from inflight_runtime.trainer.packing import MicroBatch, plan_step
from support.trainer_fakes import random_group, step_batch


def micro_batches(config: TrainerConfig, step: int) -> list[MicroBatch]:
    """Three of different shapes, so that two ranks have two and one."""
    rng = np.random.default_rng([7, step])
    groups = [random_group(rng, index, longest=4 + 8 * index, prompt=6 + 9 * index) for index in range(3)]
    return [
        batch
        for group in build_step(step_batch(step, groups), config).sequences
        for batch in plan_step([group], 512, 0.0)
    ]


def share(batches: list[MicroBatch], rank: int, ranks: int) -> list[MicroBatch]:
    """Rank ``rank``'s part, filled up with weightless ones."""
    own = batches[rank::ranks]
    missing = -(-len(batches) // ranks) - len(own)
    return own + [dataclasses.replace(batches[0], weights=np.zeros_like(batches[0].weights))] * missing


def train_step(engine: TrainerEngine, config: TrainerConfig, step: int, rank: int, ranks: int, **how: Any) -> list[float]:
    """Returns the rank's part of the loss, the norm of the gradient and whether the step was applied."""
    loss_sum = 0.0
    own = share(micro_batches(config, step), rank, ranks)
    for index, batch in enumerate(own):
        stats = engine.forward(batch)
        loss, _ = policy_loss(
            stats.logprobs,
            *(torch.from_numpy(array) for array in (batch.old_logprobs, batch.advantages, batch.weights)),
            config.loss,
            entropy=stats.entropy,
            entropy_sample=stats.entropy_sample,
        )
        loss_sum += float(loss.detach())
        engine.backward(loss * how.get("factor", 1.0), last=index == len(own) - 1)
    result = engine.optimizer_step(skip=how.get("skip", False))
    return [loss_sum, result.grad_norm, float(result.applied)]


def main(request_file: Path) -> None:
    request = json.loads(request_file.read_text())
    deepspeed.PERSISTENT_ELEMENTS = request["persistent"]
    config = TrainerConfig.model_validate(request["config"])
    resume = request["resume"] and Path(request["resume"])
    engine = make_engine(config.engine)
    engine.init(config, resume, request["first"] - 1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    history = []
    for how in request["spoiled"]:
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        factor = how["factor"] if rank == ranks - 1 else 1.0
        history.append(train_step(engine, config, 99, rank, ranks, factor=factor, skip=how["skip"]))
        engine.step -= 1
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.export_weights())
    for step in range(request["first"], request["last"] + 1):
        history.append(train_step(engine, config, step, rank, ranks))
    directory = Path(request["directory"])
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    torch.save({"history": history, "exported": exported}, directory / f"rank-{rank}.pt")
    if rank == 0:
        (directory / "saved").mkdir()
    engine.save(directory / "saved")
    dist.barrier()
    engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
