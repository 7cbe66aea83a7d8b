"""The ledger: every transition of a group, with its counters, in one transaction.

``leased -> completed -> assigned(step) -> trained(step) | dropped(reason)``; ``submitted`` always equals the sum of the
states. Plain synchronous code; :mod:`.writer` runs many operations in one transaction.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from inflight_runtime.config.roles import CoordinatorConfig
from inflight_runtime.coordinator.admission import Policy
from inflight_runtime.coordinator.database import Database, LedgerDamagedError
from inflight_runtime.coordinator.evaluation import EvaluationBook
from inflight_runtime.coordinator.payloads import PayloadStore
from inflight_runtime.coordinator.rollouts import Rollouts
from inflight_runtime.coordinator.run import RefusedError, Run
from inflight_runtime.coordinator.snapshot import STATES, Snapshot
from inflight_runtime.coordinator.steps import Steps


class Ledger:
    """Groups, steps and the sampler's position. Not thread-safe: one thread at a time.

    Attributes:
        rollouts: the actors' operations.
        steps: the trainer's operations.
        run: the run's outcome.
        evaluation: the held-out evaluation.
    """

    def __init__(self, path: Path, config: CoordinatorConfig, payloads: PayloadStore) -> None:
        """Open or make the ledger.

        Raises:
            LedgerDamagedError: the file cannot be used, is another run's, or its counters and rows disagree.
        """
        self._db = Database(path)
        self._config = config
        self._payloads = payloads
        self.run = Run(self._db, Policy.from_config(config))
        self.evaluation = EvaluationBook(self._db, config.evaluation)
        self.rollouts = Rollouts(self.run, payloads, self.evaluation, shuffle=config.shuffle, seed=config.seed)
        self.steps = Steps(self.run, payloads, self.evaluation, self.rollouts)
        try:
            self._claim()
            self.audit()
        except LedgerDamagedError:
            self._db.close()
            raise

    def snapshot(self) -> Snapshot:
        """A copy of the numbers."""
        return Snapshot(dict(self._db.counts), dict(self._db.facts))

    def audit(self) -> None:
        """Recount the rows and compare with the counters.

        Raises:
            LedgerDamagedError: they disagree.
        """
        rows = dict(self._db.sql.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        counted = {"submitted": sum(rows.values())} | {state: rows.get(state, 0) for state in STATES}
        if counted != self.run.now.states:
            raise LedgerDamagedError(
                f"{self._db.path}: the counters say {self.run.now.states} and the rows {counted}: "
                "the file was changed by something else; use a fresh run directory"
            )

    def payload_ends(self) -> dict[int, int]:
        """For each payload segment in use: the end of its last payload, without the record's header."""
        return dict(
            self._db.sql.execute(
                "SELECT segment, max(offset + length) FROM groups WHERE segment IS NOT NULL GROUP BY segment"
            ).fetchall()
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything inside durable together: payloads first, then the rows that name them."""
        self._db.begin()
        try:
            yield
            self._payloads.sync()
            self._db.commit()
        except BaseException:
            self._db.rollback()
            self.rollouts.reload()
            raise

    def savepoint(self) -> contextlib.AbstractContextManager[None]:
        """Run one operation of a transaction; if it raises, it alone is taken back."""
        return self._db.savepoint()

    def announce(self, size: int | None, eval_size: int | None) -> None:
        """Fix the dataset's size.

        Raises:
            RefusedError: 409, another size was announced before.
        """
        told = {"size": size, "eval_size": eval_size}
        known = self.run.now.record("dataset")
        if known and known != told:
            raise RefusedError(
                409,
                f"this run's dataset has {known}, another actor announces {told}: all actors of a job must load the "
                "same environment with the same data; use a fresh run directory after changing it",
            )
        self._db.facts["dataset"] = json.dumps(told)

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it."""
        self._db.close()

    def _claim(self) -> None:
        """Make the file this run's.

        Raises:
            LedgerDamagedError: it is another job's, or its memberships were made with other numbers.
        """
        policy = self.run.policy
        mine = {
            "job": self._config.job,
            "groups_per_step": policy.groups_per_step,
            "group_size": policy.group_size,
        }
        known = self.run.now.record("job")
        if known and known != mine:
            raise LedgerDamagedError(
                f"{self._db.path} belongs to a run with {known}, this one has {mine}: use a fresh run directory"
            )
        if not known:
            self._db.begin()
            self._db.facts |= {"job": json.dumps(mine), "started_at": repr(time.time())}
            self._db.commit()
