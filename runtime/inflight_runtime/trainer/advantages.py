"""Group-relative advantages: how much better an attempt was than the others at the same problem. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inflight_runtime.config.roles import AdvantageConfig

STD_FLOOR: Final = 1e-4
"""Added to the standard deviation before dividing by it, as PipelineRL does."""


def group_advantages(rewards: Sequence[float], config: AdvantageConfig) -> NDArray[np.float64]:
    """Advantages of the surviving attempts of one group.

    ``mean``: ``r_i - mean(r)`` (GRPO, Shao et al. 2024). ``leave_one_out``: ``r_i - mean(r without r_i)``, which is the
    former times ``n / (n - 1)`` (RLOO, Ahmadian et al. 2024). ``divide_by_std`` divides by the sample standard
    deviation plus :data:`STD_FLOOR`.

    Args:
        rewards: one finite reward for each surviving attempt.
        config: baseline and scaling.

    Returns:
        ``float64[n]``; exactly zero when all rewards are equal, and for a group of one.
    """
    values = np.asarray(rewards, dtype=np.float64)
    count = len(values)
    if count < 2 or (values == values[0]).all():
        return np.zeros(count)
    advantages: NDArray[np.float64] = values - values.mean()
    if config.baseline == "leave_one_out":
        advantages *= count / (count - 1)
    if config.divide_by_std:
        advantages /= values.std(ddof=1) + STD_FLOOR
    return advantages
