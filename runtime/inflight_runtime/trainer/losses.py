"""Policy losses over the sampled tokens of a micro-batch, and the sums their metrics are made of. Pure.

Every loss is a weighted sum over tokens, its weights already divided by the step's denominator (:mod:`.normalization`),
so losses and gradients of micro-batches and ranks add up to those of the step. Metrics are kept as sums for the same
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from inflight_runtime.config.roles import LossConfig

LOG_RATIO_BOUND: Final = 20.0
"""Log ratios are cut here before ``exp``: an overflow to infinity times an advantage of zero would be NaN."""


@dataclass(slots=True)
class LossSums:
    """Sums over tokens; those of two disjoint sets of tokens add up to those of their union.

    Attributes:
        tokens: number of tokens.
        loss: the weighted loss.
        ratio: importance ratio of the current policy to the sampling one.
        ratio_squared: its square.
        divergence: k3 estimate of KL(sampling || current), ``ratio - 1 - log ratio`` (Schulman 2020).
        clipped: tokens at the cap (``reinforce_tis``) or in the clipped branch (``ppo``).
        entropy: entropy over the tokens it was measured on, in nats.
        entropy_tokens: how many those are.
    """

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    divergence: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    entropy_tokens: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Read the ``float64[8]`` that :func:`policy_loss` returns."""
        return cls(*values.tolist())

    def metrics(self) -> dict[str, float]:
        """Means over the tokens; ``ess`` is the effective sample size as a share, (sum r)^2 / (n sum r^2)."""
        tokens = max(self.tokens, 1.0)
        return {
            "loss": self.loss,
            "ratio_mean": self.ratio / tokens,
            "ess": self.ratio**2 / (tokens * self.ratio_squared) if self.ratio_squared else 0.0,
            "mismatch_kl": self.divergence / tokens,
            "clip_fraction": self.clipped / tokens,
            "entropy": self.entropy / max(self.entropy_tokens, 1.0),
        }


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: LossConfig,
    *,
    entropy: Tensor | None = None,
    entropy_sample: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of a set of tokens, with r = exp(logprob - old logprob) and A the advantage.

    ``reinforce_tis``: ``-sum w A sg[min(r, is_cap)] logprob`` (PipelineRL; CISPO). ``ppo``:
    ``-sum w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (Schulman et al. 2017). With a bonus, minus
    ``entropy_bonus * sum w entropy``.

    Args:
        logprobs: ``float[T]`` under the policy that is trained, with gradient.
        old_logprobs: ``float[T]`` under the version that sampled each token.
        advantages: ``float[T]``.
        weights: ``float[T]`` of :mod:`.normalization`.
        config: which loss.
        entropy: ``float[T]`` with gradient; needed when ``config.entropy_bonus`` is not zero.
        entropy_sample: ``float[S]`` entropies of some or all tokens, for the metric.

    Returns:
        The loss (a scalar with gradient) and the sums of :class:`LossSums` as ``float64[8]`` without.

    Raises:
        ValueError: an entropy bonus and no ``entropy``.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.detach().exp()
    if config.kind == "reinforce_tis":
        capped = ratio if config.is_cap is None else ratio.clamp(max=config.is_cap)
        loss = -(weights * advantages * capped * logprobs).sum()
        clipped = torch.zeros_like(ratio) if config.is_cap is None else ratio > config.is_cap
    else:
        live = log_ratio.exp()
        plain = live * advantages
        bounded = live.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
        loss = -(weights * torch.minimum(plain, bounded)).sum()
        clipped = bounded < plain
    if config.entropy_bonus:
        if entropy is None:
            raise ValueError("the loss has an entropy bonus and the engine gave no entropy")
        loss = loss - config.entropy_bonus * (weights * entropy).sum()
    with torch.no_grad():
        sample = entropy_sample if entropy_sample is not None else ratio.new_zeros(0)
        sums = torch.stack(
            [
                torch.tensor(float(ratio.numel()), dtype=torch.float64, device=ratio.device),
                loss.detach().double(),
                ratio.sum(dtype=torch.float64),
                (ratio * ratio).sum(dtype=torch.float64),
                (ratio - 1.0 - log_ratio.detach()).sum(dtype=torch.float64),
                clipped.sum(dtype=torch.float64),
                sample.sum(dtype=torch.float64),
                torch.tensor(float(sample.numel()), dtype=torch.float64, device=ratio.device),
            ]
        )
    return loss, sums
