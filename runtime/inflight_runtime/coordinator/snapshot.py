"""The ledger's numbers as one readable object: what admission, ``/v1/state`` and ``/metrics`` look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from inflight_runtime.coordinator.admission import Load
from inflight_runtime.protocol import Outcome
from inflight_runtime.types import Version

STATES: Final = ("leased", "completed", "assigned", "trained", "dropped")
DROPPED_PREFIX: Final = "dropped:"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters (all integers) and facts (text, some of it JSON) as of one transaction.

    Counters: ``submitted``, the states, ``dropped:<reason>``, ``requeued`` (leased groups that nobody holds),
    ``consumed`` (slots of made, untrained batches that dropped groups have used), ``epoch``, ``trained_step``,
    ``assigned_step``, ``checkpoint_step`` (absent: none), ``payload_floor``, ``next_group``, ``next_evaluation``,
    ``position`` (of the sampler), ``empty_batches`` and ``too_long`` (in a row), ``attempts_failed``, ``duplicates``,
    ``fenced``, ``leases_expired``, ``trainer_starts``, ``steps_skipped``.
    """

    counts: Mapping[str, int]
    facts: Mapping[str, str]

    def count(self, name: str) -> int:
        """A counter's value; 0 when it was never touched."""
        return self.counts.get(name, 0)

    def record(self, name: str) -> dict[str, Any]:
        """A fact that holds a JSON object; empty when it was never set."""
        text = self.facts.get(name, "")
        return cast(dict[str, Any], json.loads(text)) if text else {}

    @property
    def outcome(self) -> Outcome:
        """How the run stands."""
        return cast(Outcome, self.facts.get("outcome") or "running")

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self.facts.get("reason", "")

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.outcome != "running"

    @property
    def epoch(self) -> int:
        """The current trainer's epoch; 0 before the first."""
        return self.count("epoch")

    @property
    def trained_step(self) -> int:
        """Optimizer steps completed in the surviving history."""
        return self.count("trained_step")

    @property
    def policy_version(self) -> Version:
        """The newest weight version."""
        return Version(self.epoch, self.trained_step)

    @property
    def load(self) -> Load:
        """Where the groups are, for admission."""
        return Load(
            leased=self.count("leased"),
            requeued=self.count("requeued"),
            completed=self.count("completed"),
            assigned=self.count("assigned") + self.count("consumed"),
            assigned_step=self.count("assigned_step"),
        )

    @property
    def states(self) -> dict[str, int]:
        """``submitted`` and the states whose sum it equals."""
        return {name: self.count(name) for name in ("submitted", *STATES)}

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason."""
        return {
            name.removeprefix(DROPPED_PREFIX): value
            for name, value in self.counts.items()
            if name.startswith(DROPPED_PREFIX) and value
        }
