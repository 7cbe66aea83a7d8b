from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.trainer.batching import TrainSequence
from inflight_runtime.trainer.packing import MicroBatch, attention_cost, plan_ranks, plan_step


def sequence(ids: list[int], sampled: list[int], tag: float) -> TrainSequence:
    """``old_logprobs`` names each token, so that it can be found again."""
    places = np.asarray(sampled, dtype=np.int64)
    logprobs = (tag + np.arange(len(sampled)) / 64).astype(np.float32)
    return TrainSequence(np.asarray(ids, dtype=np.int32), places, logprobs, tag, tag / 2)


@st.composite
def groups(draw: st.DrawFn) -> list[list[TrainSequence]]:
    """Groups over three token ids, so that prefixes are shared, with masked tokens and histories of their own."""
    tag = 0.0
    result = []
    token = st.integers(0, 2)
    for _ in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        sequences = []
        for _ in range(draw(st.integers(1, 6))):
            history = prompt if draw(st.integers(0, 4)) else draw(st.lists(token, min_size=1, max_size=8))
            answer = draw(st.lists(token, min_size=1, max_size=6))
            ids = history + answer
            places = range(len(history), len(ids))
            sampled = draw(st.lists(st.sampled_from(places), min_size=1, unique=True).map(sorted))
            tag += 1.0
            sequences.append(sequence(ids, sampled, tag))
        result.append(sequences)
    return result


def context(batch: MicroBatch, row: int, column: int) -> list[tuple[int, int]]:
    """Position and id of every token that this one attends to, by the rule of the mask, ordered by position."""
    seen = [j for j in range(column + 1) if column < batch.ends[row, j]]
    return sorted((int(batch.positions[row, j]), int(batch.ids[row, j])) for j in seen)


EXAMPLES = settings(max_examples=60)
BUDGET = st.integers(4, 64)
COST = st.sampled_from([0.0, 0.01, 0.3, 100.0])


@EXAMPLES
@given(groups(), BUDGET, COST, st.booleans())
def test_every_token_is_trained_once_in_exactly_its_own_context(
    plan_groups: list[list[TrainSequence]], budget: int, cost: float, share: bool
) -> None:
    expected = {
        float(logprob): (list(enumerate(s.ids[:place].tolist())), int(s.ids[place]), s.advantage, s.weight)
        for group in plan_groups
        for s in group
        for place, logprob in zip(s.sampled, s.old_logprobs, strict=True)
    }
    found: Counter[float] = Counter()
    for batch in plan_step(plan_groups, budget, cost, share=share):
        length = batch.ids.shape[1]
        for index, logprob in enumerate(batch.old_logprobs.tolist()):
            row, column = divmod(int(batch.sources[batch.token_sources[index]]), length)
            before, target, advantage, weight = expected[logprob]
            assert context(batch, row, column) == before
            assert batch.targets[index] == target
            assert (batch.advantages[index], batch.weights[index]) == (advantage, weight)
            found[logprob] += 1
    assert found == Counter(dict.fromkeys(expected, 1))


@EXAMPLES
@given(groups(), BUDGET, COST, st.booleans())
def test_a_micro_batch_keeps_to_the_budget_unless_one_sequence_alone_is_longer(
    plan_groups: list[list[TrainSequence]], budget: int, cost: float, share: bool
) -> None:
    for batch in plan_step(plan_groups, budget, cost, share=share):
        if batch.tokens_computed > budget:
            assert batch.ids.shape[0] == 1
            assert (batch.positions[0] == np.arange(batch.ids.shape[1])).all()


@EXAMPLES
@given(groups(), BUDGET, COST)
def test_the_same_input_gives_the_same_plan(plan_groups: list[list[TrainSequence]], budget: int, cost: float) -> None:
    one, two = (plan_step(plan_groups, budget, cost) for _ in range(2))
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert all(np.array_equal(getattr(left, name), getattr(right, name)) for name in MicroBatch.__slots__)


@EXAMPLES
@given(groups())
def test_padding_attends_to_itself_alone_and_is_never_attended_to(plan_groups: list[list[TrainSequence]]) -> None:
    for batch in plan_step(plan_groups, 64, 0.0):
        rows, length = batch.ids.shape
        for row in range(rows):
            used = 1 + max(int(s) % length for s in batch.sources if s // length == row)
            for column in range(used, length):
                assert batch.ends[row, column] == column + 1
            assert (batch.ends[row, :used] <= used).all()


def test_a_prompt_and_common_beginnings_are_computed_once() -> None:
    prompt = [9] * 10
    group = [
        sequence([*prompt, *answer], [10, 11, 12], tag) for tag, answer in enumerate(([1, 2, 3], [1, 2, 4], [5, 6, 7]))
    ]
    (batch,) = plan_step([group], 64, attention_cost(64))
    # 10 of the prompt, 1 and 2 once, 5 and 6; last tokens predict nothing and are not computed
    assert batch.ids.tolist() == [[*prompt, 1, 2, 5, 6]]
    assert len(batch.sources) == 5
    assert len(batch.targets) == 9


def test_long_answers_get_rows_of_their_own() -> None:
    prompt = [9] * 10
    group = [sequence([*prompt, *([tag + 1] * 2000)], list(range(10, 2010)), float(tag)) for tag in range(4)]
    batches = plan_step([group], 100_000, attention_cost(64))
    assert sum(batch.ids.shape[0] for batch in batches) == 4


def test_rows_of_very_different_length_do_not_share_a_micro_batch() -> None:
    long = [sequence(list(range(100)), [99], 1.0)]
    short = [[sequence(list(range(10)), [9], float(2 + index))] for index in range(5)]
    shapes = [batch.ids.shape for batch in plan_step([*short, long], 10_000, 0.0)]
    assert shapes == [(1, 99), (5, 9)]


def test_without_sharing_every_sequence_has_a_row() -> None:
    group = [sequence([1, 2, 3, tag], [3], float(tag)) for tag in range(4)]
    (batch,) = plan_step([group], 64, 0.0, share=False)
    assert batch.ids.shape == (4, 3)


def test_no_groups_make_no_micro_batches() -> None:
    assert plan_step([], 64, 0.0) == []


@EXAMPLES
@given(groups(), BUDGET, COST, st.integers(1, 5))
def test_ranks_get_every_token_once_and_equally_many_micro_batches(
    plan_groups: list[list[TrainSequence]], budget: int, cost: float, ranks: int
) -> None:
    plan = plan_ranks(plan_groups, budget, cost, ranks)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    expected = Counter(float(value) for group in plan_groups for s in group for value in s.old_logprobs)
    found = Counter(value for part in plan for batch in part for value in batch.old_logprobs.tolist())
    assert found == expected
    assert all(batch.tokens_computed > 0 for part in plan for batch in part)


def test_a_step_that_fits_one_micro_batch_is_split_over_the_ranks() -> None:
    work = [[sequence([1, 2, 3, index], [3], float(index))] for index in range(8)]
    assert len(plan_step(work, 10_000, 0.0)) == 1
    assert [[len(batch.targets) for batch in part] for part in plan_ranks(work, 10_000, 0.0, 2)] == [[4], [4]]
