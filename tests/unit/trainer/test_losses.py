"""The losses against loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch

from inflight_runtime.config.roles import LossConfig
from inflight_runtime.trainer.losses import LossSums, policy_loss

CONFIGS = [
    LossConfig(),
    LossConfig(is_cap=None),
    LossConfig(is_cap=1.0),
    LossConfig(kind="ppo"),
    LossConfig(kind="ppo", clip_low=0.1, clip_high=0.28),
]


def tokens(count: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    return {
        "logprobs": new,
        "old_logprobs": new + torch.randn(count, generator=generator, dtype=torch.float64) * 0.7,
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "weights": torch.rand(count, generator=generator, dtype=torch.float64),
    }


def loss_by_token(data: dict[str, torch.Tensor], config: LossConfig) -> tuple[float, list[float], int]:
    """The loss, its derivative by each logprob, and the number of clipped tokens, one token at a time."""
    total, gradient, clipped = 0.0, [], 0
    for new, old, advantage, weight in zip(*(data[name].tolist() for name in data), strict=True):
        ratio = math.exp(new - old)
        if config.kind == "reinforce_tis":
            capped = ratio if config.is_cap is None else min(ratio, config.is_cap)
            total -= weight * advantage * capped * new
            gradient.append(-weight * advantage * capped)
            clipped += config.is_cap is not None and ratio > config.is_cap
            continue
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        total -= weight * min(ratio * advantage, bounded * advantage)
        free = ratio * advantage <= bounded * advantage
        gradient.append(-weight * advantage * ratio if free else 0.0)
        clipped += not free
    return total, gradient, clipped


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_and_gradient_equal_those_of_a_loop_over_tokens(config: LossConfig) -> None:
    data = tokens()
    expected, gradient, clipped = loss_by_token(data, config)
    data["logprobs"].requires_grad_()
    loss, sums = policy_loss(**data, config=config)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert data["logprobs"].grad.tolist() == pytest.approx(gradient, rel=1e-12)
    assert LossSums.of(sums).clipped == clipped
    if config.is_cap is not None:
        assert clipped > 0, "the data must reach the bound"


def test_the_cap_limits_the_weight_and_not_the_gradient() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.tensor([-3.0]), torch.tensor([1.0]), torch.tensor([1.0]), LossConfig())
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-2.0)


def test_metrics_are_means_over_tokens() -> None:
    data = tokens(32)
    _, sums = policy_loss(**data, config=LossConfig(), entropy_sample=torch.tensor([1.0, 2.0, 6.0]))
    metrics = LossSums.of(sums).metrics()
    ratios = [math.exp(new - old) for new, old in zip(data["logprobs"], data["old_logprobs"], strict=True)]
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / 32)
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / (32 * sum(r * r for r in ratios)))
    assert metrics["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 32)
    assert metrics["clip_fraction"] == sum(r > 2 for r in ratios) / 32
    assert metrics["entropy"] == pytest.approx(3.0)


def test_on_policy_the_sample_is_fully_effective() -> None:
    data = tokens(16) | {}
    data["old_logprobs"] = data["logprobs"]
    metrics = LossSums.of(policy_loss(**data, config=LossConfig())[1]).metrics()
    assert (metrics["ratio_mean"], metrics["ess"], metrics["mismatch_kl"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums_of_parts_add_up_to_those_of_the_whole(config: LossConfig) -> None:
    data = tokens(50)
    whole = policy_loss(**data, config=config)[1]
    first, second = (
        policy_loss(**{name: value[part] for name, value in data.items()}, config=config)[1]
        for part in (slice(0, 7), slice(7, 50))
    )
    assert (first + second).tolist() == pytest.approx(whole.tolist(), rel=1e-12)


def test_the_entropy_bonus_pulls_the_loss_down_by_the_weighted_entropy() -> None:
    data = tokens(8)
    entropy = torch.rand(8, dtype=torch.float64, requires_grad=True)
    plain, _ = policy_loss(**data, config=LossConfig())
    config = LossConfig(entropy_bonus=0.01)
    loss, _ = policy_loss(**data, config=config, entropy=entropy, entropy_sample=entropy.detach())
    loss.backward()
    assert (plain - loss).item() == pytest.approx(0.01 * (data["weights"] * entropy).sum().item())
    assert entropy.grad.tolist() == pytest.approx((-0.01 * data["weights"]).tolist())
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss(**data, config=config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_an_absurd_ratio_with_advantage_zero_stays_finite(config: LossConfig) -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, sums = policy_loss(logprobs, torch.tensor([-1e4]), torch.zeros(1), torch.ones(1), config)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.item() == 0
    assert sums.isfinite().all()


def test_metrics_of_no_tokens_are_zero() -> None:
    assert set(LossSums().metrics().values()) == {0.0}
