from __future__ import annotations

import pytest

from inflight_runtime.trainer.normalization import attempt_weights

TOKENS = [[3, 5], [1, 2, 4]]
PLAN = {"planned_groups": 3, "group_size": 4, "max_tokens": 10}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_sum_per_sequence", [[1 / 12, 1 / 12], [1 / 12, 1 / 12, 1 / 12]]),
        ("sequence_mean", [[1 / (12 * 3), 1 / (12 * 5)], [1 / (12 * 1), 1 / (12 * 2), 1 / (12 * 4)]]),
        ("token_mean", [[1 / 15, 1 / 15], [1 / 15, 1 / 15, 1 / 15]]),
        ("group_mean", [[1 / (3 * 8), 1 / (3 * 8)], [1 / (3 * 7)] * 3]),
        ("constant", [[1 / 120, 1 / 120], [1 / 120] * 3]),
    ],
)
def test_weights_are_those_of_the_definition(name: str, expected: list[list[float]]) -> None:
    weights = attempt_weights(name, TOKENS, **PLAN)
    assert [group.tolist() for group in weights] == [pytest.approx(group, rel=1e-12) for group in expected]


def test_a_full_step_of_token_mean_weighs_one_in_all() -> None:
    weights = attempt_weights("token_mean", TOKENS, **PLAN)
    assert sum(w * t for ws, ts in zip(weights, TOKENS, strict=True) for w, t in zip(ws, ts, strict=True)) == (
        pytest.approx(1.0)
    )
