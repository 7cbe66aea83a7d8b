from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.coordinator.sampler import ExhaustedError, Sampler


def drawn(sampler: Sampler, count: int, excluded: set[int], position: int = 0) -> list[int]:
    found = []
    for _ in range(count):
        index, position = sampler.draw(position, excluded)
        found.append(index)
    return found


@given(st.integers(1, 40), st.integers(0, 5), st.booleans(), st.integers(1, 3))
def test_every_pass_visits_every_problem_once(size: int, seed: int, shuffle: bool, passes: int) -> None:
    found = drawn(Sampler(size, shuffle=shuffle, seed=seed), size * passes, set())
    for number in range(passes):
        assert sorted(found[number * size : (number + 1) * size]) == list(range(size))


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 200))
def test_a_position_gives_the_same_problem_in_any_process(size: int, seed: int, position: int) -> None:
    first = Sampler(size, shuffle=True, seed=seed)
    drawn(first, 100, set())
    assert first.draw(position, ()) == Sampler(size, shuffle=True, seed=seed).draw(position, ())


def test_passes_and_seeds_are_shuffled_differently() -> None:
    one = drawn(Sampler(50, shuffle=True, seed=1), 100, set())
    assert one[:50] != one[50:]
    assert one[:50] != drawn(Sampler(50, shuffle=True, seed=2), 50, set())


def test_in_order_without_shuffling_and_for_an_endless_dataset() -> None:
    assert drawn(Sampler(3, shuffle=False, seed=0), 5, set()) == [0, 1, 2, 0, 1]
    assert drawn(Sampler(None, shuffle=True, seed=0), 4, {1}) == [0, 2, 3, 4]


@given(st.integers(2, 20), st.data())
def test_excluded_problems_are_never_drawn(size: int, data: st.DataObject) -> None:
    excluded = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    found = drawn(Sampler(size, shuffle=True, seed=0), 3 * size, excluded)
    assert set(found) == set(range(size)) - excluded


def test_a_dataset_without_a_usable_problem_is_exhausted() -> None:
    with pytest.raises(ExhaustedError, match="all 3 problems"):
        Sampler(3, shuffle=True, seed=0).draw(0, {0, 1, 2})
