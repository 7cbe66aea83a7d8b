from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.coordinator.admission import (
    ENOUGH_LEASED,
    NO_SERVER,
    SERVER_CAPACITY,
    STALENESS_BOUND,
    Candidate,
    Load,
    Policy,
    exclusions,
    judge,
    room,
    server_cap,
)


def policy(**changes: object) -> Policy:
    values = {"steps": 10, "groups_per_step": 4, "group_size": 8, "max_staleness": 1} | changes
    return Policy(**values)  # type: ignore[arg-type]


policies = st.builds(
    Policy,
    steps=st.integers(1, 20),
    groups_per_step=st.integers(1, 8),
    group_size=st.integers(2, 16),
    max_staleness=st.integers(0, 5),
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    leased = draw(st.integers(0, 40))
    return Load(
        leased=leased,
        requeued=draw(st.integers(0, leased)),
        completed=draw(st.integers(0, 40)),
        assigned=draw(st.integers(0, 40)),
        assigned_step=draw(st.integers(0, 20)),
    )


@given(policies, loads(), st.integers(0, 50))
def test_what_is_admitted_keeps_every_bound(rules: Policy, load: Load, cap: int) -> None:
    got = room(rules, load, cap)
    assert 0 <= got.requeued <= load.requeued
    assert got.new >= 0
    if got.requeued or got.new:
        assert load.held + got.requeued + got.new <= cap
        assert got.reason == ""
    else:
        assert got.reason
    if got.new:
        assert load.outstanding + got.new <= (rules.max_staleness + 1) * rules.groups_per_step
        assert load.leased + load.completed + got.new <= (rules.steps - load.assigned_step) * rules.groups_per_step


@given(policies, loads(), st.integers(1, 50))
def test_nothing_is_held_back_without_need(rules: Policy, load: Load, cap: int) -> None:
    got = room(rules, load, cap)
    if rules.max_staleness == 0 and load.assigned:
        return
    bound = (rules.max_staleness + 1) * rules.groups_per_step - load.outstanding
    needed = (rules.steps - load.assigned_step) * rules.groups_per_step - load.leased - load.completed
    spare = cap - load.held - got.requeued
    assert got.new == max(0, min(bound, needed, spare)) or got.requeued < load.requeued


def test_the_reason_names_what_is_in_the_way() -> None:
    assert room(policy(), Load(0, 0, 0, 0, 0), 0).reason == NO_SERVER
    assert room(policy(), Load(3, 0, 0, 0, 0), 3).reason == SERVER_CAPACITY
    assert room(policy(), Load(2, 0, 2, 4, 1), 64).reason == STALENESS_BOUND
    assert room(policy(), Load(4, 0, 0, 0, 9), 64).reason == ENOUGH_LEASED


def test_without_staleness_nothing_is_leased_while_a_batch_waits_to_be_trained() -> None:
    rules = policy(max_staleness=0)
    assert room(rules, Load(leased=0, requeued=0, completed=0, assigned=0, assigned_step=3), 64).new == 4
    assert room(rules, Load(leased=0, requeued=0, completed=0, assigned=3, assigned_step=4), 64).new == 0
    assert room(rules, Load(leased=2, requeued=2, completed=0, assigned=2, assigned_step=4), 64).requeued == 0


@pytest.mark.parametrize(
    ("capacities", "group_size", "cap"),
    [([], 8, 0), ([64], 8, 8), ([64, 64], 8, 16), ([4], 8, 1), ([4, 4], 8, 1), ([12, 12], 8, 2)],
)
def test_the_servers_cap_counts_whole_groups_and_is_at_least_one(
    capacities: list[int], group_size: int, cap: int
) -> None:
    assert server_cap(capacities, group_size) == cap


@pytest.mark.parametrize(
    ("how", "rewards", "dropped", "excluded"),
    [
        ("keep", [1.0, 1.0], "", ""),
        ("drop", [1.0, 1.0], "", "zero_variance"),
        ("refill", [1.0, 1.0], "zero_variance", ""),
        ("refill", [1.0, 0.0], "", ""),
        ("drop", [0.1 + 0.2, 0.3], "", ""),
        ("keep", [1.0], "attempts_failed", ""),
        ("drop", [], "attempts_failed", ""),
    ],
)
def test_a_finished_group_is_judged_by_its_survivors_rewards(
    how: str, rewards: list[float], dropped: str, excluded: str
) -> None:
    verdict = judge(policy(zero_variance=how), len(rewards), rewards)
    assert (verdict.dropped, verdict.excluded) == (dropped, excluded)


@given(st.floats(-1e6, 1e6), st.integers(2, 64))
def test_equal_rewards_are_seen_as_equal_whatever_their_value(reward: float, count: int) -> None:
    assert judge(policy(zero_variance="refill"), count, [reward] * count).dropped == "zero_variance"


def test_age_counts_from_the_weights_a_step_starts_with() -> None:
    rules = policy(over_age="drop", max_staleness=1)
    candidates = [Candidate(0, 4), Candidate(1, 3), Candidate(2, 2, "zero_variance"), Candidate(3, 2)]
    assert exclusions(rules, 5, candidates) == {2: "zero_variance", 3: "over_age"}


@pytest.mark.parametrize("how", ["keep", "mask"])
def test_old_groups_stay_in_their_batch_unless_they_are_to_be_dropped(how: str) -> None:
    assert exclusions(policy(over_age=how), 9, [Candidate(0, 0)]) == {}
