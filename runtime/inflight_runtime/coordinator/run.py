"""How the run stands: what the ledger's parts share."""

from __future__ import annotations

import time

from inflight_runtime.coordinator.admission import Policy
from inflight_runtime.coordinator.database import Database
from inflight_runtime.coordinator.snapshot import DROPPED_PREFIX, Snapshot


class RefusedError(Exception):
    """An operation that must not be done; ``status`` is the HTTP status it answers with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Run:
    """The numbers inside the running transaction, and the run's end."""

    def __init__(self, db: Database, policy: Policy) -> None:
        self.db = db
        self.policy = policy

    @property
    def now(self) -> Snapshot:
        """The numbers, live (not a copy)."""
        return Snapshot(self.db.counts, self.db.facts)

    def count_dropped(self, reason: str) -> None:
        """Count a group that has become ``dropped``."""
        self.db.add("dropped")
        self.db.add(DROPPED_PREFIX + reason)

    def fail(self, reason: str) -> None:
        """End a run that is not over as failed; the first reason stays."""
        if not self.now.finished:
            self._end("failed", reason)

    def end_if_done(self) -> None:
        """End the run as succeeded when its last step is trained."""
        if self.db.count("trained_step") >= self.policy.steps:
            self._end("succeeded", "")

    def reopen(self) -> None:
        """A trainer goes back to an earlier step of a run that had succeeded."""
        self.db.facts |= {"outcome": "running", "finished_at": ""}

    def _end(self, outcome: str, reason: str) -> None:
        self.db.facts |= {"outcome": outcome, "reason": reason, "finished_at": repr(time.time())}
