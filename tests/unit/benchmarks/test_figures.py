from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from figures import (
    TARGETS,
    Target,
    TooLittleDataError,
    gap_over,
    gaps,
    intervals_between,
    judge_targets,
    longest_gaps,
    percentile,
    progress,
    share_of_machine,
    speed_ratio,
    spread,
    update_interval,
)
from hypothesis import given
from hypothesis import strategies as st

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_percentile_of_nothing_says_so() -> None:
    with pytest.raises(TooLittleDataError, match="percentile 95 of no values"):
        percentile([], 95)


@pytest.mark.parametrize("q", [-1, 101])
def test_percentile_out_of_bounds_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1.0], q)


def test_spread_has_median_tail_maximum_and_count() -> None:
    assert spread([float(value) for value in range(101)]) == {"p50": 50, "p95": 95, "max": 100, "count": 101}


def step(number: int, at: float, **other: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time": at,
        "attempts": 120,
        "attempts_failed": 8,
        "tokens_sampled": 500,
        "wait_seconds": 0.1,
    } | other


def test_progress_counts_steps_and_completions_after_the_windows_first_record() -> None:
    records = [step(number, 100 + 0.5 * number) for number in range(1, 21)]
    done = progress(records, since=105.0, until=109.0)  # steps 10 to 18
    assert done.steps == 8
    assert done.seconds == pytest.approx(4.0)
    assert done.steps_per_second == pytest.approx(2.0)
    assert done.completions_per_second == pytest.approx(2 * 128)
    assert done.tokens_per_second == pytest.approx(2 * 500)
    assert done.wait_share == pytest.approx(8 * 0.1 / 4)


@pytest.mark.parametrize("records", [[], [step(1, 5.0)], [step(1, 50.0), step(2, 51.0)]])
def test_progress_over_fewer_than_two_steps_is_refused(records: list[dict[str, Any]]) -> None:
    with pytest.raises(TooLittleDataError, match="steps ended within 10 s"):
        progress(records, since=0.0, until=10.0)


def test_the_interval_of_an_update_is_in_seconds() -> None:
    assert update_interval({"time": 10.0, "update_ms": 250.0}) == (10.0, 10.25)


def test_gaps_are_between_neighbours() -> None:
    assert gaps([1.0, 1.5, 3.5]) == [0.5, 2.0]
    assert gaps([1.0]) == []


def test_the_gap_over_an_update_is_the_longest_that_overlaps_it() -> None:
    arrivals = [0.0, 1.0, 1.1, 1.4, 1.5, 9.0]
    assert gap_over(arrivals, (1.05, 1.45)) == pytest.approx(0.3)
    assert gap_over(arrivals, (1.2, 1.3)) == pytest.approx(0.3)
    assert gap_over(arrivals, (1.05, 1.08)) == pytest.approx(0.1)


@pytest.mark.parametrize(("begin", "end"), [(-0.1, 0.5), (0.5, 1.2), (2.0, 3.0)])
def test_a_stream_that_was_not_under_way_all_the_time_does_not_count(begin: float, end: float) -> None:
    assert gap_over([0.0, 1.0], (begin, end)) is None


def test_a_stream_of_one_token_has_no_gap() -> None:
    assert gap_over([1.0], (1.0, 1.0)) is None


def test_each_update_counts_with_its_slowest_stream() -> None:
    quick = [index / 10 for index in range(101)]  # 0 to 10
    stalled = [0.0, 1.0, 3.0, 3.1, 10.0]
    found = longest_gaps([quick, stalled], [(1.5, 1.6), (3.02, 3.05), (20.0, 21.0)])
    assert found == pytest.approx([2.0, 0.1])


@given(
    st.lists(st.floats(0.001, 1.0), min_size=2, max_size=30),
    st.lists(st.floats(0.001, 1.0), min_size=2, max_size=30),
    st.floats(0, 5),
    st.floats(0, 1),
)
def test_one_more_stream_never_makes_a_gap_shorter(
    one: list[float], other: list[float], begin: float, length: float
) -> None:
    first, second = np.cumsum([0.0, *one]).tolist(), np.cumsum([0.0, *other]).tolist()
    interval = (begin, begin + length)
    alone, both = longest_gaps([first], [interval]), longest_gaps([first, second], [interval])
    assert len(both) >= len(alone)
    assert all(more >= less for more, less in zip(both, alone, strict=False))


def test_between_updates_lies_in_the_middle_and_overlaps_none() -> None:
    found = intervals_between([(2.0, 2.2), (0.0, 0.2), (2.3, 2.4)])
    assert found == [pytest.approx((1.0, 1.2))]  # 2.2 to 2.3 is too short for 0.2


def test_shares_are_of_all_cores() -> None:
    assert share_of_machine(3.0, 10.0, 2) == pytest.approx(0.15)
    with pytest.raises(TooLittleDataError):
        share_of_machine(1.0, 0.0, 2)


def test_the_ratio_is_of_the_means() -> None:
    assert speed_ratio([8.0, 4.0], [2.0, 4.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(("fast", "slow"), [([], [1.0]), ([1.0], []), ([1.0], [0.0])])
def test_a_ratio_without_both_sides_is_refused(fast: list[float], slow: list[float]) -> None:
    with pytest.raises(TooLittleDataError):
        speed_ratio(fast, slow)


def test_a_target_is_met_at_its_bound_and_missed_beyond() -> None:
    assert Target("speed", least=4).judge(4.0) == {"measured": 4.0, "at_least": 4, "met": True}
    assert not Target("speed", least=4).judge(3.9)["met"]
    assert Target("pause", most=60).judge(60.0) == {"measured": 60.0, "at_most": 60, "met": True}
    assert not Target("pause", most=60).judge(60.1)["met"]


def test_every_target_is_judged_and_none_may_be_left_out() -> None:
    values = {target.name: 0.0 for target in TARGETS}
    judged = judge_targets(values)
    assert set(judged) == set(values)
    assert {name for name, result in judged.items() if not result["met"]} == {
        target.name for target in TARGETS if target.least is not None
    }
    del values["server_pss_mb"]
    with pytest.raises(KeyError, match="server_pss_mb"):
        judge_targets(values)
