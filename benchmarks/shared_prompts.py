"""What sharing prompts buys: forward and backward of one step, prefix trees against padded rows.

The padded rows are what a careful trainer without sharing does: sequences sorted by length, 16 rows a micro-batch, the
vocabulary projection only where answers are (``logits_to_keep``). Prints one JSON object:

    python benchmarks/shared_prompts.py            # tiny Qwen2, and a Llama of SmolLM2-135M's shape
    python benchmarks/shared_prompts.py --only tiny
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_data import Shape, make_config, make_data
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.batching import StepData
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.losses import policy_loss
from inflight_runtime.trainer.packing import attention_cost, plan_step

PADDED_ROWS = 16


@dataclass(frozen=True)
class Case:
    """A model and the shape of a step."""

    name: str
    shape: Shape
    repeats: int
    make: Callable[[], PreTrainedModel]


def tiny() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


def smollm2() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
        )
    )  # fmt: skip


CASES = (
    Case("tiny", Shape(groups=16, attempts=8, prompt=20, answers=(4, 6)), repeats=20, make=tiny),
    Case("smollm2", Shape(groups=8, attempts=8, prompt=37, answers=(3, 8)), repeats=3, make=smollm2),
)


def shared_step(engine: SingleEngine, data: StepData, config: TrainerConfig, hidden: int) -> float:
    total = 0.0
    for batch in plan_step(data.sequences, config.micro_batch_tokens, attention_cost(hidden)):
        stats = engine.forward(batch)
        fixed = (torch.from_numpy(array) for array in (batch.old_logprobs, batch.advantages, batch.weights))
        loss, _ = policy_loss(stats.logprobs, *fixed, config.loss, entropy_sample=stats.entropy_sample)
        engine.backward(loss, last=False)
        total += loss.item()
    return total


def padded_step(engine: SingleEngine, data: StepData, config: TrainerConfig) -> float:
    sequences = sorted((s for group in data.sequences for s in group), key=lambda s: len(s.ids))
    total = 0.0
    for start in range(0, len(sequences), PADDED_ROWS):
        rows = sequences[start : start + PADDED_ROWS]
        length, keep = max(len(s.ids) for s in rows), max(len(s.ids) - int(s.sampled[0]) for s in rows)
        # Left padding lines the answers up at the end, where logits_to_keep wants them.
        ids, mask = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(2))
        old, advantages, weights = (np.zeros((len(rows), keep), dtype=np.float32) for _ in range(3))
        for index, sequence in enumerate(rows):
            count = len(sequence.sampled)
            ids[index, length - len(sequence.ids) :] = sequence.ids
            mask[index, length - len(sequence.ids) :] = 1
            old[index, keep - count :] = sequence.old_logprobs
            advantages[index, keep - count :] = sequence.advantage
            weights[index, keep - count :] = sequence.weight
        tokens, attention = torch.from_numpy(ids), torch.from_numpy(mask)
        logits = engine.model(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=keep + 1,
            use_cache=False,
        ).logits[:, :-1]
        chosen = logits.gather(-1, tokens[:, -keep:, None])[..., 0] - logits.logsumexp(-1)
        fixed = (torch.from_numpy(array).flatten() for array in (old, advantages, weights))
        loss, _ = policy_loss(chosen.flatten(), *fixed, config.loss)
        loss.backward()
        total += loss.item()
    return total


def gradient(engine: SingleEngine) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in engine.parameters])


def measure(engine: SingleEngine, step: Callable[[], float], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        engine.optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def run(case: Case, threads: int, repeats: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        case.make().save_pretrained(directory / "model")
        config = make_config(directory, directory / "model", case.shape, threads=threads)
        engine = SingleEngine()
        info = engine.init(config, None, 0)
        data = make_data(case.shape, config, info.vocab_size)
        shared = lambda: shared_step(engine, data, config, info.hidden_size)  # noqa: E731
        padded = lambda: padded_step(engine, data, config)  # noqa: E731

        shared_loss, shared_gradient = shared(), gradient(engine)
        engine.optimizer.zero_grad(set_to_none=True)
        padded_loss, padded_gradient = padded(), gradient(engine)
        count = repeats or case.repeats
        # Taken in turns, so that a busy machine is busy for both.
        times: dict[str, list[float]] = {"shared": [], "padded": []}
        for _ in range(count):
            times["shared"] += measure(engine, shared, 1)
            times["padded"] += measure(engine, padded, 1)
        batches = plan_step(data.sequences, config.micro_batch_tokens, attention_cost(info.hidden_size))
        best = {name: min(values) for name, values in times.items()}
        return {
            "groups": case.shape.groups,
            "attempts": case.shape.attempts,
            "parameters": info.parameters,
            "tokens_shared": sum(batch.tokens_computed for batch in batches),
            "tokens_repeated": sum(len(s.ids) for group in data.sequences for s in group),
            "shared_seconds": round(best["shared"], 4),
            "padded_seconds": round(best["padded"], 4),
            "shared_seconds_median": round(statistics.median(times["shared"]), 4),
            "padded_seconds_median": round(statistics.median(times["padded"]), 4),
            "speedup": round(best["padded"] / best["shared"], 2),
            "loss_difference": abs(shared_loss - padded_loss),
            "gradient_difference": float((shared_gradient - padded_gradient).norm() / padded_gradient.norm()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, help="timed repetitions; the best one counts")
    arguments = parser.parse_args()
    result = {
        case.name: run(case, arguments.threads, arguments.repeats)
        for case in CASES
        if arguments.only in (None, case.name)
    }
    print(json.dumps({"threads": arguments.threads} | result, indent=1))


if __name__ == "__main__":
    main()
