"""Two ranks of DeepSpeed, on CPUs, do what the single engine does on its own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_runtime.config.roles import LossConfig, OptimizerConfig, TrainerConfig
from inflight_runtime.trainer.engines.single import SingleEngine
from integration.trainer.deepspeed_rank import micro_batches, train_step
from support.forked_ranks import ForkedRanks, Launch
from support.tiny_models import make_tiny_model
from support.trainer_fakes import trainer_config
from support.trainer_side import hf_logits, load_exported, load_hf

DEADLINE_S = 240.0
STEPS = 5
LOGITS = 1e-3
"""Of models that differ by rounding; two tensors that are mixed up change them by whole units."""
pytestmark = pytest.mark.timeout(600)

ADAMW = OptimizerConfig(learning_rate=1e-3)
# AdamW without memory whose eps is far above every gradient divides by a constant: plain SGD with rate 0.05.
SKIPPED = {"factor": 1.0, "skip": True}
NOT_FINITE = {"factor": math.nan, "skip": False}
SGD = OptimizerConfig(learning_rate=5e4, eps=1e6, betas=(0.0, 0.0), weight_decay=0.0)


@dataclass(frozen=True)
class Result:
    """What a run left: loss, gradient norm and "applied" of each step, the weights and the checkpoint."""

    history: list[list[float]]
    weights: dict[str, torch.Tensor]
    checkpoint: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied and an untied model, and one with experts."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "qwen2": make_tiny_model(directory / "qwen2", "qwen2", tied=True, initializer_range=0.1),
        "llama": make_tiny_model(directory / "llama", "llama", tied=False, initializer_range=0.1),
        "qwen3_moe": make_tiny_model(directory / "qwen3_moe", "qwen3_moe", tied=False, initializer_range=0.1),
    }


def job(directory: Path, model: Path, optimizer: OptimizerConfig, **changes: Any) -> TrainerConfig:
    return trainer_config(directory, model, groups_per_step=3, optimizer=optimizer, **changes)


def single(config: TrainerConfig, directory: Path, *, steps: Sequence[int], resume: Path | None = None) -> Result:
    """The single engine on all micro-batches."""
    engine = SingleEngine()
    engine.init(config.model_copy(update={"engine": "single"}), resume, steps[0] - 1)
    history = [train_step(engine, config, step, 0, 1) for step in steps]
    engine.save(directory)
    return Result(history, {name: tensor.clone() for name, tensor in engine.export_weights()}, directory)


def ranks(
    forked: ForkedRanks, requests: Sequence[dict[str, Any]], directory: Path, count: int = 2
) -> dict[str, Result]:
    """Work off requests, one after the other, on ``count`` ranks, whose results must be the same."""
    for request in requests:
        Path(request["directory"]).mkdir()
    path = directory / "requests.json"
    path.write_text(json.dumps(requests))
    launch = Launch("integration.trainer.deepspeed_rank", [str(path)], count, str(directory / "ranks.log"), DEADLINE_S)
    code, output = forked.run(launch)
    assert code == 0, output
    return {Path(request["directory"]).name: result(Path(request["directory"]), count) for request in requests}


def result(directory: Path, count: int) -> Result:
    first, *others = (torch.load(directory / f"rank-{rank}.pt", weights_only=True) for rank in range(count))
    for other in others:
        assert other["exported"].keys() == first["exported"].keys()
        assert all(torch.equal(tensor, first["exported"][name]) for name, tensor in other["exported"].items())
        assert [line[1:] for line in other["history"]] == [line[1:] for line in first["history"]]
    losses = [[line[0] for line in rank["history"]] for rank in (first, *others)]
    history = [[sum(parts), *line[1:]] for *parts, line in zip(*losses, first["history"], strict=True)]
    return Result(history, first["exported"], directory)


def differences(found: Result, expected: Result) -> tuple[float, float]:
    """Largest relative difference of a loss or gradient norm, and of a tensor's norm: ``|a - b| / |b|``."""
    assert found.weights.keys() == expected.weights.keys()
    assert [line[2] for line in found.history] == [line[2] for line in expected.history]
    numbers = max(
        abs(a - b) / max(1.0, abs(b))
        for mine, theirs in zip(found.history, expected.history, strict=True)
        for a, b in zip(mine[:2], theirs[:2], strict=True)
    )
    norms = max(
        abs(float(found.weights[name].double().norm() / tensor.double().norm()) - 1.0)
        for name, tensor in expected.weights.items()
    )
    return numbers, norms


def test_micro_batches_are_unequal(tmp_path: Path, models: dict[str, Path]) -> None:
    shapes = {batch.ids.shape for batch in micro_batches(job(tmp_path, models["llama"], ADAMW), 1)}
    assert len(shapes) == 3


@pytest.fixture(scope="module", params=[1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def results(
    stage: int, models: dict[str, Path], forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """One launch a stage for all tests."""
    directory = tmp_path_factory.mktemp(f"stage-{stage}")

    def request(
        name: str, arch: str, optimizer: OptimizerConfig, first: int = 1, last: int = STEPS, **fields: Any
    ) -> dict[str, Any]:
        changes = {
            key: fields.pop(key) for key in ("offload_optimizer", "activation_checkpointing", "loss") if key in fields
        }
        config = job(directory, models[arch], optimizer, engine="deepspeed", zero_stage=stage, **changes)
        files = config.model.model_copy(update={"dtype": fields.pop("dtype", "float32")})
        split = config.model_copy(update={"model": files}).model_dump(mode="json")
        place = {"config": split, "directory": str(directory / name)}
        return place | {"first": first, "last": last} | fields

    return ranks(
        forked,
        [
            request("qwen2-sgd", "qwen2", SGD),
            request("qwen2-adamw", "qwen2", ADAMW),
            request("llama-sgd", "llama", SGD),
            request("llama-adamw", "llama", ADAMW),
            request("qwen3_moe-sgd", "qwen3_moe", SGD),
            request("qwen3_moe-adamw", "qwen3_moe", ADAMW),
            request("spoiled", "llama", ADAMW, last=2, spoiled=[SKIPPED, NOT_FINITE]),
            request("chunks", "qwen2", ADAMW, chunk=10 * 264, loss=LossConfig(entropy_bonus=0.01)),
            request("persistent", "llama", ADAMW, persistent=100_000),
            request("offload", "llama", ADAMW, offload_optimizer=True),
            request("bfloat16", "llama", ADAMW, dtype="bfloat16"),
            request("recompute", "llama", ADAMW, activation_checkpointing=True),
            request("recompute-bfloat16", "llama", ADAMW, activation_checkpointing=True, dtype="bfloat16"),
            # Activation checkpointing may come and go at a resume.
            request("first-half", "llama", ADAMW, last=3, activation_checkpointing=True),
            request("second-half", "llama", ADAMW, first=4, resume=str(directory / "first-half")),
        ],
        directory,
    )


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    directory = tmp_path_factory.mktemp("single")
    jobs = {
        f"{arch}-{name}": job(directory, model, optimizer)
        for arch, model in models.items()
        for name, optimizer in (("sgd", SGD), ("adamw", ADAMW))
    }
    jobs["chunks"] = job(directory, models["qwen2"], ADAMW, loss=LossConfig(entropy_bonus=0.01))
    found = {}
    for name, config in jobs.items():
        (directory / name).mkdir()
        found[name] = single(config, directory / name, steps=range(1, STEPS + 1))
    return found


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("qwen2-sgd", "qwen2-sgd"),
        ("qwen2-adamw", "qwen2-adamw"),
        ("llama-sgd", "llama-sgd"),
        ("llama-adamw", "llama-adamw"),
        ("qwen3_moe-sgd", "qwen3_moe-sgd"),
        ("qwen3_moe-adamw", "qwen3_moe-adamw"),
        ("chunks", "chunks"),
        ("persistent", "llama-adamw"),
        ("offload", "llama-adamw"),
        ("recompute", "llama-adamw"),
    ],
)
def test_steps_are_those_of_the_single_engine(
    results: dict[str, Result],
    expected: dict[str, Result],
    name: str,
    reference: str,
) -> None:
    numbers, norms = differences(results[name], expected[reference])
    assert numbers <= 1e-5
    assert norms <= (1e-5 if name.endswith("sgd") else 2e-4)


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3_moe"])
def test_a_checkpoint_is_a_model_of_transformers(
    results: dict[str, Result], expected: dict[str, Result], models: dict[str, Path], tmp_path: Path, arch: str
) -> None:
    found = results[f"{arch}-adamw"]
    assert ("lm_head.weight" in found.weights) is (arch != "qwen2")  # tied: once
    trained = hf_logits(load_exported(found.weights, models[arch], tmp_path / "trained"))
    assert torch.equal(hf_logits(load_hf(found.checkpoint / "model")), trained)
    found, single = (here[f"{arch}-sgd"] for here in (results, expected))
    logits = hf_logits(load_exported(found.weights, models[arch], tmp_path / "found"))
    assert (logits - hf_logits(load_exported(single.weights, models[arch], tmp_path / "single"))).abs().max() < LOGITS


def test_skipped_steps_leave_no_trace(results: dict[str, Result], expected: dict[str, Result]) -> None:
    skipped, spoiled, *rest = results["spoiled"].history
    assert skipped[2] == spoiled[2] == 0.0
    assert skipped[1] > 0
    assert not math.isfinite(spoiled[1])
    for line, reference in zip(rest, expected["llama-adamw"].history, strict=False):
        assert line == pytest.approx(reference, rel=1e-5)


def test_bfloat16_computes_from_float32_weights(results: dict[str, Result], expected: dict[str, Result]) -> None:
    found, exact = results["bfloat16"], expected["llama-adamw"]
    assert all(tensor.dtype == torch.float32 for tensor in found.weights.values())
    numbers, norms = differences(found, exact)
    assert 1e-5 < numbers < 0.1
    assert norms < 0.01
    numbers, norms = differences(results["recompute-bfloat16"], found)
    assert numbers <= 1e-5
    assert norms <= 1e-5


def test_a_checkpoint_goes_on_where_it_ended(
    results: dict[str, Result], expected: dict[str, Result], models: dict[str, Path], tmp_path: Path
) -> None:
    whole = expected["llama-adamw"]
    later = Result(whole.history[3:], whole.weights, whole.checkpoint)
    config = job(tmp_path, models["llama"], ADAMW)
    on_one = single(config, tmp_path, steps=[4, 5], resume=results["first-half"].checkpoint)
    for found in (results["second-half"], on_one):
        numbers, norms = differences(found, later)
        assert numbers <= 1e-5
        assert norms <= 2e-4


def test_a_checkpoint_of_one_process_goes_on_with_weights_split_unevenly_over_three(
    expected: dict[str, Result], models: dict[str, Path], forked: ForkedRanks, tmp_path: Path
) -> None:
    config = job(tmp_path, models["qwen2"], ADAMW)
    (tmp_path / "half").mkdir()
    single(config, tmp_path / "half", steps=[1, 2, 3])
    split = config.model_copy(update={"engine": "deepspeed", "zero_stage": 3}).model_dump(mode="json")
    place = {"config": split, "directory": str(tmp_path / "three"), "resume": str(tmp_path / "half")}
    found = ranks(forked, [place | {"first": 4, "last": 5}], tmp_path, count=3)["three"]
    whole = expected["qwen2-adamw"]
    numbers, norms = differences(found, Result(whole.history[3:], whole.weights, whole.checkpoint))
    assert numbers <= 1e-5
    assert norms <= 2e-4


def test_a_moment_of_another_shape_is_refused(
    expected: dict[str, Result], models: dict[str, Path], forked: ForkedRanks, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(expected["llama-adamw"].checkpoint, checkpoint)
    state = torch.load(checkpoint / "trainer.pt", weights_only=True)
    state["optimizer"][3]["exp_avg"] = torch.zeros(3)
    torch.save(state, checkpoint / "trainer.pt")
    config = job(tmp_path, models["llama"], ADAMW, engine="deepspeed").model_dump(mode="json")
    place = {"config": config, "directory": str(tmp_path / "run"), "resume": str(checkpoint)}
    with pytest.raises(AssertionError, match=r"EngineError: the optimizer state of .* has shape \[3\], the parameter"):
        ranks(forked, [place | {"first": 6, "last": 6}], tmp_path, count=1)
