"""Which exit code the launcher of ranks ends with."""

from __future__ import annotations

import pytest

from inflight_runtime.trainer.agent import exit_code, first_cause


@pytest.mark.parametrize(
    ("codes", "rank", "code"),
    [
        ({0: 0, 1: 0}, None, 0),
        ({}, None, 0),
        ({0: 2, 1: 2}, 0, 2),
        ({0: 1, 1: 1}, 0, 1),
        ({2: 1, 1: 1}, 1, 1),
        ({0: 0, 1: 3}, 1, 3),
        ({0: 143, 1: 143}, 0, 143),
    ],
)
def test_the_lowest_rank_of_several_that_failed_alike_is_named(
    codes: dict[int, int], rank: int | None, code: int
) -> None:
    assert (first_cause(codes), exit_code(codes)) == (rank, code)


@pytest.mark.parametrize("cause", [2, 3, 137])
def test_a_rank_that_lost_another_one_is_not_the_cause(cause: int) -> None:
    assert first_cause({0: 1, 1: cause}) == 1
    assert exit_code({0: 1, 1: cause}) == cause


def test_a_signal_becomes_the_exit_code_that_shells_give_it() -> None:
    assert exit_code({0: 1, 1: -9}) == 137
    assert exit_code({0: -15}) == 143
