"""How a local run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a job is checked without what the wire needs
    from inflight_runtime.protocol import RunState

Outcome = Literal["succeeded", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        outcome: in a word.
        exit_code: of ``inflight run``.
        reason: why it failed or who interrupted it, with log lines.
        state: the coordinator's last answer.
        restarts: by role.
        seconds: from the first start to the last end.
    """

    outcome: Outcome
    exit_code: int
    reason: str
    state: RunState | None
    restarts: dict[str, int]
    seconds: float

    @property
    def over(self) -> bool:
        """Whether the run is over for good: done, or declared failed by one of its roles."""
        declared = self.state is not None and self.state.outcome == "failed"
        return self.outcome == "succeeded" or (self.outcome == "failed" and declared)
