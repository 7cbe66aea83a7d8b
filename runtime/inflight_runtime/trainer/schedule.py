"""The learning rate of a step: a pure function, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from inflight_runtime.config.roles import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step ``step``.

    Rises linearly over ``warmup_steps``, then stays, or falls to zero
    after the last step, linearly or as half a cosine.

    Args:
        config: peak, warm-up and shape.
        step: 1 for the first step of the run.
        steps: steps of the whole run.
    """
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return peak
    # The first step after the warm-up has the peak, the step after the last would have zero.
    done = (step - config.warmup_steps - 1) / max(1, steps - config.warmup_steps)
    if config.schedule == "linear":
        return peak * max(0.0, 1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
