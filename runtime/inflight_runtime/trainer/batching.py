"""From a step's groups to the sequences it trains on: advantages, weights and ages. Pure.

One sequence is one segment of one attempt. What the loss needs of each sampled token is fixed here, once for the whole
step; packing (:mod:`.packing`) only arranges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.advantages import group_advantages
from inflight_runtime.trainer.normalization import attempt_weights
from inflight_runtime.types import Attempt, Group, IntArray, Segment

if TYPE_CHECKING:
    from inflight_runtime.coordinator.client import StepBatch

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
NO_PROMPT: Final = np.zeros(0, dtype=np.int32)


class BatchError(ValueError):
    """A batch is not the one that was asked for, or may not be trained on; the message says which rule it breaks."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """A token sequence and the T sampled tokens of it that are trained.

    Attributes:
        ids: ``int32[S]`` the whole sequence, its prompt included.
        sampled: ``int64[T]`` their positions in ``ids``, ascending, all at least 1.
        old_logprobs: ``float32[T]`` their logprobs when they were sampled.
        advantage: of the attempt, hence of each of the tokens.
        weight: of each of the tokens in the loss.
    """

    ids: IntArray
    sampled: Ints
    old_logprobs: Floats
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class AttemptRecord:
    """What the logs say of one attempt: its place, its advantage and its tokens' ages (in steps, oldest and mean)."""

    group: int
    attempt: int
    advantage: float
    tokens: int
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True, slots=True, eq=False)
class StepData:
    """Everything a step is trained on.

    Attributes:
        step: the step that this batch produces.
        groups: in canonical order.
        sequences: for each group its sequences that have a token to train.
        records: for each group one record for each surviving attempt.
        planned_groups: groups in the step as planned.
        excluded: groups of the plan that are not trained, by reason.
        tokens_sampled: sampled tokens in the batch, masked ones included.
        over_age_tokens: those of them older than ``max_staleness``.
    """

    step: int
    groups: Sequence[Group]
    sequences: list[list[TrainSequence]]
    records: list[list[AttemptRecord]]
    planned_groups: int
    excluded: dict[str, int]
    tokens_sampled: int
    over_age_tokens: int


def check_batch(batch: StepBatch, step: int, config: TrainerConfig, vocab_size: int) -> None:
    """Check that a batch is the one that was asked for and fits this job and model.

    Raises:
        BatchError: it does not.
    """
    if batch.step != step or batch.policy_step != step - 1:
        raise BatchError(f"asked for step {step}, got step {batch.step} trained from step {batch.policy_step}")
    if batch.planned_groups != config.groups_per_step:
        raise BatchError(
            f"step {step}: planned with {batch.planned_groups} groups, this trainer's groups_per_step is "
            f"{config.groups_per_step}; coordinator and trainer must be rendered from the same job"
        )
    order = [group.group_id for group in batch.groups]
    if order != sorted(set(order)) or len(order) > batch.planned_groups:
        raise BatchError(f"step {step}: groups {order} are doubled, out of order or more than planned")
    for group in batch.groups:
        where = f"step {step} group {group.group_id}"
        if len(group.attempts) != config.group_size:
            raise BatchError(f"{where}: {len(group.attempts)} attempts, group_size is {config.group_size}")
        for ids in (group.prompt_ids, *(s.ids for attempt in group.attempts for s in attempt.segments)):
            if len(ids) and int(ids.max()) >= vocab_size:
                raise BatchError(f"{where}: token id {int(ids.max())} is outside the model's vocabulary ({vocab_size})")
        for attempt in group.attempts:
            for segment in attempt.segments:
                length = len(segment.ids) + (len(group.prompt_ids) if segment.shares_prompt else 0)
                if length > config.model.max_length:
                    raise BatchError(f"{where}: {length} tokens, the model's max_length is {config.model.max_length}")


def build_step(batch: StepBatch, config: TrainerConfig) -> StepData:
    """Compute advantages, weights and ages of a batch that :func:`check_batch` has passed.

    A token's age is ``(step - 1) - its version's step``. Tokens older than ``max_staleness`` are counted; under
    ``over_age: mask`` they are not trained, their weight staying in the denominators.

    Raises:
        BatchError: ``over_age: drop`` and a token is too old: the coordinator should have dropped its group.
    """
    survivors = [group.survivors for group in batch.groups]
    weights = attempt_weights(
        config.loss.normalization,
        [[attempt.sampled_tokens for attempt in attempts] for attempts in survivors],
        planned_groups=batch.planned_groups,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
    )
    all_sequences: list[list[TrainSequence]] = []
    all_records: list[list[AttemptRecord]] = []
    sampled = over_age = 0
    limit = config.max_staleness
    for group, group_weights in zip(batch.groups, weights, strict=True):
        alive = [(number, attempt) for number, attempt in enumerate(group.attempts) if attempt.ok]
        advantages = group_advantages([attempt.reward for _, attempt in alive], config.advantage)
        sequences: list[TrainSequence] = []
        records: list[AttemptRecord] = []
        for (number, attempt), advantage, weight in zip(
            alive, advantages.tolist(), group_weights.tolist(), strict=True
        ):
            record = _record(group.group_id, number, attempt, advantage, batch.policy_step)
            records.append(record)
            sampled += record.tokens
            if record.staleness_max > limit:
                old = sum(size for age, size in _ages(attempt, batch.policy_step) if age > limit)
                if config.over_age == "drop":
                    raise BatchError(
                        f"step {batch.step} group {group.group_id} attempt {number}: {old} tokens are older than "
                        f"max_staleness {limit} under over_age 'drop'; the coordinator should have dropped the group"
                    )
                over_age += old
            oldest_step = batch.policy_step - limit if config.over_age == "mask" else None
            for segment in attempt.segments:
                sequence = _sequence(group, segment, oldest_step, advantage, weight)
                if len(sequence.sampled):
                    sequences.append(sequence)
        all_sequences.append(sequences)
        all_records.append(records)
    return StepData(
        step=batch.step,
        groups=batch.groups,
        sequences=all_sequences,
        records=all_records,
        planned_groups=batch.planned_groups,
        excluded=batch.excluded,
        tokens_sampled=sampled,
        over_age_tokens=over_age,
    )


def _ages(attempt: Attempt, policy_step: int) -> list[tuple[int, int]]:
    """``(age, tokens)`` of each version span; a version of a timeline that was rolled back counts as new."""
    return [(max(0, policy_step - span.step), span.end - span.start) for span in attempt.spans()]


def _record(group: int, number: int, attempt: Attempt, advantage: float, policy_step: int) -> AttemptRecord:
    ages = _ages(attempt, policy_step)
    tokens = sum(size for _, size in ages)
    return AttemptRecord(
        group=group,
        attempt=number,
        advantage=advantage,
        tokens=tokens,
        staleness_mean=sum(age * size for age, size in ages) / tokens,
        staleness_max=max(age for age, _ in ages),
    )


def _sequence(
    group: Group, segment: Segment, oldest_step: int | None, advantage: float, weight: float
) -> TrainSequence:
    prompt = group.prompt_ids if segment.shares_prompt else NO_PROMPT
    mask = segment.mask
    if oldest_step is not None and any(span.step < oldest_step for span in segment.spans):
        mask = mask.copy()
        for span in segment.spans:
            if span.step < oldest_step:
                mask[span.start : span.end] = False
    places = mask.nonzero()[0]
    return TrainSequence(
        ids=np.concatenate([prompt, segment.ids]),
        sampled=places + len(prompt),
        old_logprobs=segment.logprobs[places],
        advantage=advantage,
        weight=weight,
    )
