from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.config.roles import AdvantageConfig
from inflight_runtime.trainer.advantages import group_advantages

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12)


@given(REWARDS)
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :]) for index, reward in enumerate(rewards)
    ]
    assert group_advantages(rewards, AdvantageConfig()) == pytest.approx(expected, abs=1e-9)


@given(REWARDS)
def test_the_mean_baseline_subtracts_the_mean_of_all(rewards: list[float]) -> None:
    expected = [reward - statistics.fmean(rewards) for reward in rewards]
    assert group_advantages(rewards, AdvantageConfig(baseline="mean")) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_std_is_that_of_a_sample_plus_a_floor(baseline: str) -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    plain = group_advantages(rewards, AdvantageConfig(baseline=baseline))
    scaled = group_advantages(rewards, AdvantageConfig(baseline=baseline, divide_by_std=True))
    assert scaled == pytest.approx([value / (statistics.stdev(rewards) + 1e-4) for value in plain], rel=1e-12)


@pytest.mark.parametrize("config", [AdvantageConfig(), AdvantageConfig(baseline="mean", divide_by_std=True)])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(config: AdvantageConfig, reward: float) -> None:
    assert (group_advantages([reward] * 7, config) == 0).all()


def test_one_survivor_has_no_advantage() -> None:
    assert group_advantages([3.0], AdvantageConfig()).tolist() == [0.0]
