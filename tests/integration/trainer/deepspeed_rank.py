"""One rank of test_deepspeed.py: for each request it trains on its share of the micro-batches and writes results."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer import logprobs
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
    one, none, nothing = np.zeros((1, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    weightless = MicroBatch(one, one, one + 1, one[0], none, none, nothing, nothing, nothing)
    return own + [weightless] * missing


def train_step(
    engine: TrainerEngine, config: TrainerConfig, step: int, rank: int, ranks: int, **how: Any
) -> list[float]:
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


def run(request: dict[str, Any], rank: int, ranks: int) -> None:
    """One engine's life, as the request describes it."""
    deepspeed.PERSISTENT_ELEMENTS = request.get("persistent", 0)
    logprobs.CHUNK_ELEMENTS = request.get("chunk", 1 << 25)
    config = TrainerConfig.model_validate(request["config"])
    resume = Path(request["resume"]) if "resume" in request else None
    engine = make_engine(config.engine)
    engine.init(config, resume, request["first"] - 1)
    history = []
    for how in request.get("spoiled", []):
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        factor = how["factor"] if rank == ranks - 1 else 1.0
        history.append(train_step(engine, config, 99, rank, ranks, factor=factor, skip=how["skip"]))
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.export_weights())
    for step in range(request["first"], request["last"] + 1):
        history.append(train_step(engine, config, step, rank, ranks))
    directory = Path(request["directory"])
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    torch.save({"history": history, "exported": exported}, directory / f"rank-{rank}.pt")
    engine.save(directory)
    engine.close()
    dist.barrier()  # the next one may read what rank 0 has written


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for request in json.loads(Path(sys.argv[1]).read_text()):
        run(request, dist.get_rank(), dist.get_world_size())
