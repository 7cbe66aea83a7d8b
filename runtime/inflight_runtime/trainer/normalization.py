"""The weight of each token in the loss (DESIGN 5.4), fixed once per step before anything is masked. Pure.

Because a weight depends on the planned step alone, it is the same however the step is cut into micro-batches or spread
over ranks, and the weighted losses of the parts simply add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight_runtime.config.roles import Normalization


def attempt_weights(
    normalization: Normalization,
    tokens: Sequence[Sequence[int]],
    *,
    planned_groups: int,
    group_size: int,
    max_tokens: int,
) -> list[NDArray[np.float64]]:
    """Weight of every sampled token of each attempt.

    With N = ``planned_groups * group_size`` attempts in the planned step and T sampled tokens of an attempt:
    ``token_sum_per_sequence`` 1/N (PipelineRL), ``sequence_mean`` 1/(N T) (GRPO), ``token_mean`` 1/(sum of T over the
    step) (DAPO), ``group_mean`` 1/(groups x tokens of the group), ``constant`` 1/(N max_tokens) (Dr. GRPO).

    Planned counts include groups and attempts that were dropped or failed: leaving out what has no signal must not make
    the rest count for more. Token counts can only be those of the attempts that are there.

    Args:
        normalization: which of the five.
        tokens: for each group of the batch, the sampled tokens of each surviving attempt.
        planned_groups: groups in the step as planned.
        group_size: attempts in a group as planned.
        max_tokens: new tokens that an attempt may have.

    Returns:
        For each group ``float64[attempts]``.
    """
    attempts = planned_groups * group_size
    counts = [np.asarray(group, dtype=np.float64) for group in tokens]
    if normalization == "token_sum_per_sequence":
        return [np.full(len(count), 1.0 / attempts) for count in counts]
    if normalization == "sequence_mean":
        return [1.0 / (attempts * count) for count in counts]
    if normalization == "token_mean":
        total = sum(float(count.sum()) for count in counts)
        return [np.full(len(count), 1.0 / total) for count in counts]
    if normalization == "group_mean":
        return [np.full(len(count), 1.0 / (planned_groups * count.sum())) for count in counts]
    return [np.full(len(count), 1.0 / (attempts * max_tokens)) for count in counts]
