"""What a trainer engine must do. The loop knows nothing else of it, so engines for one or for many ranks plug in alike.

The loss arrives already divided by the step's global denominator. So the gradient that ``optimizer_step`` applies must
be the SUM of the gradients of every ``backward`` since the last step, over micro-batches and over ranks: an engine
whose library averages over ranks multiplies the loss by their number first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.packing import MicroBatch


class EngineError(RuntimeError):
    """The engine cannot train this model with this config; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the loop must know of a loaded model."""

    parameters: int
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenStats:
    """Of the T trained tokens of a micro-batch, under the current policy at the job's temperature.

    Attributes:
        logprobs: ``float32[T]`` with gradient, natural log.
        entropy: ``float32[T]`` entropy of each token's distribution in nats, with gradient; only when the loss has an
            entropy bonus.
        entropy_sample: ``float32[S]`` entropies of some or all of the tokens, without gradient, for the metric.
    """

    logprobs: Tensor
    entropy: Tensor | None
    entropy_sample: Tensor


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step.

    Attributes:
        grad_norm: global L2 norm before clipping.
        learning_rate: that this step has, or would have had.
        applied: false when the step was skipped, by request or because the gradient is not finite.
    """

    grad_norm: float
    learning_rate: float
    applied: bool


class TrainerEngine(Protocol):
    """A policy and its optimizer."""

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """Load the model, from ``resume`` (what :meth:`save` wrote, optimizer included) or from the config.

        Args:
            config: the trainer's config.
            resume: directory of a whole checkpoint; ``None``: start from ``config.model``.
            step: optimizer steps of this run done so far; the learning-rate schedule goes on from here.

        Raises:
            EngineError: the model cannot be loaded or trained.
        """
        ...

    def forward(self, batch: MicroBatch) -> TokenStats:
        """Run the model with gradient; the temperature is applied inside."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; ``last``: no other follows in this step."""
        ...

    def optimizer_step(self, *, skip: bool = False) -> StepStats:
        """Clip, step and clear the gradients; with ``skip``, or when they are not finite, only clear them."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, one by one, under their HF checkpoint names; tied ones once.

        A collective: every rank iterates to the end. A tensor is valid until the next one is asked for.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write ``directory/model`` (HF format) and ``directory/trainer.pt``. A collective."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...
