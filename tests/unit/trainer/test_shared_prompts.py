"""Prefix trees against plain sequences: the same loss and the same gradient, on real architectures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inflight_runtime.config.roles import LossConfig, TrainerConfig
from inflight_runtime.trainer import logprobs as logprobs_module
from inflight_runtime.trainer.batching import StepData, build_step
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.losses import policy_loss
from inflight_runtime.trainer.packing import attention_cost, plan_step
from inflight_runtime.types import Attempt, Group, Segment, Span, make_segment
from support.tiny_models import make_tiny_model
from support.trainer_fakes import step_batch, trainer_config

ARCHS = ("qwen2", "llama", "qwen3_moe")
LOSSES = (LossConfig(), LossConfig(kind="ppo", entropy_bonus=0.01, normalization="group_mean"))


@pytest.fixture(scope="module", params=ARCHS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"kv_heads": 1} if request.param == "llama" else {}
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, initializer_range=0.1, **heads)


def segment(rng: np.random.Generator, size: int, *, gaps: bool, own: bool = False) -> Segment:
    mask = np.ones(size, dtype=bool)
    if gaps:  # what the environment put in
        mask[size // 3 : size // 2] = False
    if own:
        mask[:3] = False
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    spans = [Span(1, 0, int(a), int(b), "s", "b") for a, b in zip(edges[::2], edges[1::2], strict=True)]
    scores = np.where(mask, -rng.random(size) * 6, 0.0)
    return make_segment(rng.integers(0, 6, size), mask, scores, spans, shares_prompt=not own)


def data_for(config: TrainerConfig, seed: int = 0) -> StepData:
    """Groups with common beginnings (few ids), several turns, histories of their own and prompts of many lengths."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(config.groups_per_step):
        attempts = []
        for number in range(config.group_size):
            segments = [segment(rng, int(rng.integers(2, 24)), gaps=number % 2 == 1)]
            if number % 3 == 2:
                segments.append(segment(rng, 20, gaps=True, own=True))
            attempts.append(Attempt(tuple(segments), reward=float(rng.random())))
        prompt = rng.integers(0, 264, int(rng.integers(5, 40))).astype(np.int32)
        groups.append(Group(index, 1, index, prompt, tuple(attempts)))
    return build_step(step_batch(1, groups), config)


def gradient(engine: SingleEngine) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in engine.parameters])


def engine_for(config: TrainerConfig) -> SingleEngine:
    engine = SingleEngine()
    engine.init(config, None, 0)
    return engine


def shared(engine: SingleEngine, data: StepData, config: TrainerConfig, budget: int) -> tuple[float, torch.Tensor]:
    total = 0.0
    engine.model.zero_grad()
    for batch in plan_step(data.sequences, budget, attention_cost(64)):
        stats = engine.forward(batch)
        loss, _ = policy_loss(
            stats.logprobs,
            *(torch.from_numpy(array) for array in (batch.old_logprobs, batch.advantages, batch.weights)),
            config.loss,
            entropy=stats.entropy,
        )
        engine.backward(loss, last=False)
        total += loss.item()
    return total, gradient(engine)


def plain(engine: SingleEngine, data: StepData, config: TrainerConfig) -> tuple[float, torch.Tensor]:
    """One sequence at a time through the whole model, without mask, positions or packing."""
    total = 0.0
    engine.model.zero_grad()
    for sequence in (sequence for group in data.sequences for sequence in group):
        ids = torch.from_numpy(sequence.ids).long()
        logits = engine.model(input_ids=ids[None]).logits[0] / config.temperature
        distribution = logits.log_softmax(-1)
        places = torch.from_numpy(sequence.sampled)
        count = len(places)
        loss, _ = policy_loss(
            distribution[places - 1, ids[places]],
            torch.from_numpy(sequence.old_logprobs),
            torch.full((count,), sequence.advantage),
            torch.full((count,), sequence.weight),
            config.loss,
            entropy=-(distribution.exp() * distribution).sum(-1)[places - 1],
        )
        loss.backward()
        total += loss.item()
    return total, gradient(engine)


def assert_equal(left: tuple[float, torch.Tensor], right: tuple[float, torch.Tensor]) -> None:
    assert left[0] == pytest.approx(right[0], abs=1e-6)
    assert (left[1] - right[1]).norm() <= 1e-5 * right[1].norm()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
@pytest.mark.parametrize("budget", [1024, 96])
def test_loss_and_gradient_equal_those_of_plain_sequences(
    tmp_path: Path, model: Path, loss: LossConfig, budget: int
) -> None:
    config = trainer_config(tmp_path, model, groups_per_step=3, group_size=6, loss=loss, temperature=0.8, max_tokens=24)
    data, engine = data_for(config), engine_for(config)
    assert_equal(shared(engine, data, config, budget), plain(engine, data, config))


def test_cutting_the_vocabulary_projection_into_chunks_changes_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loss in LOSSES:
        config = trainer_config(tmp_path, model, groups_per_step=3, group_size=6, loss=loss)
        data, engine = data_for(config), engine_for(config)
        whole = shared(engine, data, config, 1024)
        with monkeypatch.context() as patch:
            patch.setattr(logprobs_module, "CHUNK_ELEMENTS", 264 * 7)
            assert_equal(shared(engine, data, config, 1024), whole)


def test_sharing_computes_far_fewer_tokens(tmp_path: Path, model: Path) -> None:
    config = trainer_config(tmp_path, model, groups_per_step=3, group_size=6)
    data = data_for(config)
    repeated, trees = (
        sum(batch.tokens_computed for batch in plan_step(data.sequences, 1024, attention_cost(64), share=share))
        for share in (False, True)
    )
    assert trees < 0.6 * repeated
