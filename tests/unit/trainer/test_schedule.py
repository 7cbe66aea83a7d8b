from __future__ import annotations

import pytest

from inflight_runtime.config.roles import OptimizerConfig
from inflight_runtime.trainer.schedule import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_constant_is_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warmup_rises_evenly_to_the_peak() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_falls_evenly_and_would_reach_zero_after_the_last_step() -> None:
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_halfway_down_in_the_middle() -> None:
    values = rates(8, schedule="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0


def test_a_warmup_longer_than_the_run_never_reaches_the_peak() -> None:
    assert max(rates(3, warmup_steps=9, schedule="linear")) < 1.0
