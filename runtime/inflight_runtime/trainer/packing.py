"""Prefix trees: the tokens that a group's sequences share are computed once, and rows become micro-batches. Pure.

The attempts of a group share their prompt, and often the beginning of their answers. A row holds some sequences of one
group as a tree in depth-first order: each distinct prefix stands there once, at the position (depth) that it has in its
sequences, and a token attends to its ancestors and itself. Each token therefore sees exactly what it would see in its
own sequence, so logprobs and gradients are those of plain rows up to rounding.

In depth-first order the descendants of node ``j`` are a run that starts at ``j``; with ``ends[j]`` one past that run,

    token i attends to token j   iff   j <= i < ends[j]

so one integer a token describes the whole attention mask. Padding has ``ends[j] = j + 1``: it sees only itself.

Rows of similar length form a micro-batch. One dense mask over several groups would cost its square; rows do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inflight_runtime.trainer.batching import Floats, Ints, TrainSequence

PADDING_FACTOR: Final = 2
"""A row shorter than the micro-batch's longest by more than this factor starts a new micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """R rows of L tokens with K positions that predict T trained tokens.

    Attributes:
        ids: ``int64[R, L]`` token ids, 0 in the padding.
        positions: ``int64[R, L]`` position of each token in its own sequence.
        ends: ``int64[R, L]`` one past the last descendant: the attention mask (see above).
        sources: ``int64[K]`` flat index ``row * L + column`` of each position whose next-token distribution is needed.
        token_sources: ``int64[T]`` index into ``sources`` for each trained token.
        targets: ``int64[T]`` the trained tokens' ids.
        old_logprobs: ``float32[T]``.
        advantages: ``float32[T]``.
        weights: ``float32[T]``.
    """

    ids: Ints
    positions: Ints
    ends: Ints
    sources: Ints
    token_sources: Ints
    targets: Ints
    old_logprobs: Floats
    advantages: Floats
    weights: Floats

    @property
    def tokens_computed(self) -> int:
        """Tokens that go through the model, padding included."""
        return int(self.ids.size)


def plan_step(
    groups: Sequence[Sequence[TrainSequence]], token_budget: int, attention_cost: float, *, share: bool = True
) -> list[MicroBatch]:
    """Arrange a step's sequences in micro-batches; the same input gives the same plan.

    Args:
        groups: the sequences of each group.
        token_budget: most tokens in a micro-batch, padding included. Only a single sequence that is longer by itself
            goes beyond: it cannot be cut.
        attention_cost: ``b`` in the cost ``L + b L^2`` of a row of L tokens (see :func:`attention_cost`).
        share: false puts every sequence in a row of its own, as a trainer without prefix sharing does.

    Returns:
        Micro-batches that hold every trained token exactly once.
    """
    rows = [row for group in groups for row in _tree_rows(group, token_budget, attention_cost, share)]
    rows.sort(key=lambda row: -len(row.ids))  # stable: equal lengths stay in canonical order
    batches: list[MicroBatch] = []
    current: list[_Row] = []
    for row in rows:
        if current:
            longest = len(current[0].ids)
            if (len(current) + 1) * longest > token_budget or len(row.ids) * PADDING_FACTOR < longest:
                batches.append(_pad(current))
                current = []
        current.append(row)
    if current:
        batches.append(_pad(current))
    return batches


def plan_ranks(
    groups: Sequence[Sequence[TrainSequence]], token_budget: int, attention_cost: float, ranks: int
) -> list[list[MicroBatch]]:
    """Arrange a step's sequences for several ranks.

    Returns:
        For each rank the same number of micro-batches, weightless ones where there are not enough. The i-th ones of all
        ranks are of similar length, since ranks wait for each other in each.
    """
    batches = plan_step(groups, token_budget, attention_cost)
    if 0 < len(batches) < ranks:  # some would idle
        fair = -(-sum(batch.tokens_computed for batch in batches) // ranks)
        batches = plan_step(groups, fair, attention_cost)
    batches += [weightless_micro_batch()] * (-len(batches) % ranks)
    return [batches[rank::ranks] for rank in range(ranks)]


def weightless_micro_batch() -> MicroBatch:
    """One token that predicts something and none that is trained: its loss and its gradient are zero."""
    one = np.zeros((1, 1), dtype=np.int64)
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    return MicroBatch(one, one, one + 1, one[0], none, none, nothing, nothing, nothing)


def attention_cost(hidden_size: int) -> float:
    """``b`` in the cost ``L + b L^2`` of a row.

    Per layer, linear layers take about ``24 d^2`` floating-point operations a token and attention ``4 d`` a pair.
    """
    return 1.0 / (6.0 * hidden_size)


@dataclass(slots=True, eq=False)
class _Row:
    ids: NDArray[np.int32]
    positions: Ints
    ends: Ints
    nodes: list[Ints]
    """For each sequence, the node that predicts each of its trained tokens."""
    sequences: list[TrainSequence]


class _Tree:
    """A row under construction: sequences are added in lexicographic order, so that shared prefixes are neighbours."""

    def __init__(self) -> None:
        self.ids: list[NDArray[np.int32]] = []
        self.positions: list[Ints] = []
        self.closed: list[tuple[Ints, int]] = []
        self.size = 0
        self.path: Ints = np.zeros(0, dtype=np.int64)
        self.last: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self.nodes: list[Ints] = []
        self.sequences: list[TrainSequence] = []

    def shared_with(self, inputs: NDArray[np.int32]) -> int:
        """Length of the prefix of ``inputs`` that stands in the tree already."""
        length = min(len(inputs), len(self.last))
        different = np.flatnonzero(inputs[:length] != self.last[:length])
        return int(different[0]) if len(different) else length

    def add(self, sequence: TrainSequence, inputs: NDArray[np.int32], shared: int) -> None:
        new = len(inputs) - shared
        self.closed.append((self.path[shared:], self.size))
        self.path = np.concatenate([self.path[:shared], np.arange(self.size, self.size + new)])
        self.ids.append(inputs[shared:])
        self.positions.append(np.arange(shared, len(inputs)))
        self.size += new
        self.last = inputs
        self.nodes.append(self.path[sequence.sampled - 1])
        self.sequences.append(sequence)

    def row(self) -> _Row:
        ends = np.full(self.size, self.size, dtype=np.int64)
        for nodes, end in self.closed:
            ends[nodes] = end
        return _Row(np.concatenate(self.ids), np.concatenate(self.positions), ends, self.nodes, self.sequences)


def _tree_rows(group: Sequence[TrainSequence], budget: int, cost: float, share: bool) -> list[_Row]:
    """Rows of one group. A sequence joins the row before it when that is cheaper than a row of its own."""
    # Nothing is predicted from a sequence's last trained token, so it need not be computed.
    entries = [(sequence.ids[: int(sequence.sampled[-1])], sequence) for sequence in group]
    entries.sort(key=lambda entry: entry[0].astype(">i4").tobytes())  # big-endian bytes compare as the ids do
    trees: list[_Tree] = []
    for inputs, sequence in entries:
        if trees and share:
            tree = trees[-1]
            shared = tree.shared_with(inputs)
            size = tree.size + len(inputs) - shared
            if size <= budget and _cost(size, cost) - _cost(tree.size, cost) <= _cost(len(inputs), cost):
                tree.add(sequence, inputs, shared)
                continue
        trees.append(_Tree())
        trees[-1].add(sequence, inputs, 0)
    return [tree.row() for tree in trees]


def _cost(length: int, quadratic: float) -> float:
    return length + quadratic * length * length


def _pad(rows: list[_Row]) -> MicroBatch:
    length = max(len(row.ids) for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(ids)
    ends = np.tile(np.arange(1, length + 1), (len(rows), 1))
    nodes: list[Ints] = []
    sequences: list[TrainSequence] = []
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size] = row.ids
        positions[index, :size] = row.positions
        ends[index, :size] = row.ends
        nodes += [index * length + part for part in row.nodes]
        sequences += row.sequences
    counts = [len(sequence.sampled) for sequence in sequences]
    sources, token_sources = np.unique(np.concatenate(nodes), return_inverse=True)
    return MicroBatch(
        ids=ids,
        positions=positions,
        ends=ends,
        sources=sources,
        token_sources=token_sources,
        targets=np.concatenate([s.ids[s.sampled] for s in sequences]).astype(np.int64),
        old_logprobs=np.concatenate([s.old_logprobs for s in sequences]),
        advantages=np.repeat(np.asarray([s.advantage for s in sequences], dtype=np.float32), counts),
        weights=np.repeat(np.asarray([s.weight for s in sequences], dtype=np.float32), counts),
    )
