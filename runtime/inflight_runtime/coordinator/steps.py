"""The trainer's side of the ledger: epochs, step membership, commits, checkpoints.

A step that was given its groups keeps them for ever, so that a replay after a crash trains on the same data. Runs
inside a transaction that the caller opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inflight_runtime.coordinator import admission
from inflight_runtime.coordinator.admission import Candidate
from inflight_runtime.coordinator.evaluation import EvaluationBook
from inflight_runtime.coordinator.payloads import PayloadRef, PayloadStore
from inflight_runtime.coordinator.rollouts import Rollouts
from inflight_runtime.coordinator.run import RefusedError, Run


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A step's membership: payloads in canonical order and how many groups used a slot untrained, by reason."""

    step: int
    groups: list[int]
    refs: list[PayloadRef]
    excluded: dict[str, int]


@dataclass(frozen=True, slots=True)
class Started:
    """A trainer's new epoch, and the leases that are still held: (group id, fence, actor id)."""

    epoch: int
    held: list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A group whose payload may be shown to people; ``step`` is ``None`` before it is in a batch."""

    state: str
    step: int | None
    ref: PayloadRef


class Steps:
    """Groups from ``completed`` over ``assigned(step)`` to ``trained(step)``."""

    def __init__(self, run: Run, payloads: PayloadStore, evaluation: EvaluationBook, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._run = run
        self._db = run.db
        self._policy = run.policy
        self._payloads = payloads
        self._evaluation = evaluation

    def start_trainer(self, resume_step: int) -> Started:
        """Begin a new epoch at ``resume_step``: later steps go back to assigned, with the same groups.

        Raises:
            RefusedError: 410, the run has failed; 422, there is no way to go on from that step.
        """
        now = self._run.now
        if now.outcome == "failed":
            raise RefusedError(410, f"the run has failed: {now.reason}")
        made, floor = now.count("assigned_step"), now.count("payload_floor")
        if resume_step > self._policy.steps:
            raise RefusedError(422, f"cannot start at step {resume_step}: the run ends at step {self._policy.steps}")
        if made == 0:
            self._db.put("assigned_step", resume_step)  # a checkpoint outlived its ledger: go on from it
            self._db.put("payload_floor", resume_step)
        elif not floor <= resume_step <= made:
            raise RefusedError(
                422,
                f"cannot start at step {resume_step}: this ledger can replay from steps {floor} to {made} only. "
                "Resume from a checkpoint in that range, or use a fresh run directory",
            )
        sql = self._db.sql
        if self._policy.max_staleness == 0 and resume_step < now.trained_step:
            self._take_leases_back()
        back = sql.execute(
            "UPDATE groups SET state = 'assigned' WHERE step > ? AND state = 'trained'", (resume_step,)
        ).rowcount
        forth = sql.execute(
            "UPDATE groups SET state = 'trained' WHERE step <= ? AND state = 'assigned'", (resume_step,)
        ).rowcount
        consumed = sql.execute(
            "SELECT count(*) FROM groups WHERE step > ? AND state = 'dropped'", (resume_step,)
        ).fetchone()[0]
        self._db.add("assigned", back - forth)
        self._db.add("trained", forth - back)
        self._db.put("consumed", consumed)
        self._db.put("trained_step", resume_step)
        self._db.add("epoch")
        self._db.add("trainer_starts")
        self._run.reopen()
        self._evaluation.restart(resume_step)
        self._run.end_if_done()
        return Started(self._db.count("epoch"), self._rollouts.held())

    def _take_leases_back(self) -> None:
        """Under η = 0 what is being generated was meant for weights that the rollback has taken away."""
        taken = self._db.sql.execute(
            "UPDATE groups SET fence = fence + 1, owner = NULL, request = NULL "
            "WHERE state = 'leased' AND owner IS NOT NULL"
        ).rowcount
        self._db.add("requeued", taken)

    def batch(self, step: int, epoch: int) -> BatchPlan | None:
        """Get a step's membership, making it if it is the next step and enough groups are completed.

        Returns:
            ``None`` when it is not ready (or the run has just failed: look at the outcome).

        Raises:
            RefusedError: 409, a stale epoch; 410, the run is over or the payloads are gone; 422, no such step.
        """
        self._check_epoch(epoch)
        now = self._run.now
        if now.outcome == "failed":
            raise RefusedError(410, f"the run has failed: {now.reason}")
        made = now.count("assigned_step")
        if not 1 <= step <= self._policy.steps:
            raise RefusedError(422, f"there is no step {step}: this run has steps 1 to {self._policy.steps}")
        if step > made + 1:
            raise RefusedError(422, f"step {step} asked for, and step {made + 1} has no batch yet: ask in order")
        if step == made + 1 and not self._make_batch(step):
            return None
        rows = self._db.sql.execute(
            "SELECT id, segment, offset, length FROM groups WHERE step = ? AND state IN ('assigned', 'trained') "
            "ORDER BY id",
            (step,),
        ).fetchall()
        if any(row[1] is None for row in rows):
            raise RefusedError(410, f"the rollouts of step {step} are gone: a later checkpoint made them superfluous")
        excluded = self._db.sql.execute(
            "SELECT reason, count(*) FROM groups WHERE step = ? AND state = 'dropped' GROUP BY reason", (step,)
        ).fetchall()
        return BatchPlan(step, [row[0] for row in rows], [PayloadRef(*row[1:]) for row in rows], dict(excluded))

    def _make_batch(self, step: int) -> bool:
        """Assign the oldest B completed groups; a batch without any trainable one is replaced by the next."""
        size = self._policy.groups_per_step
        while self._db.count("completed") >= size:
            rows = self._db.sql.execute(
                "SELECT id, oldest_step, coalesce(reason, '') FROM groups WHERE state = 'completed' "
                "ORDER BY id LIMIT ?",
                (size,),
            ).fetchall()
            excluded = admission.exclusions(self._policy, step, [Candidate(*row) for row in rows])
            kept = [row[0] for row in rows if row[0] not in excluded]
            self._db.add("completed", -size)
            self._exclude(excluded, step if kept else None)
            if kept:
                self._assign(step, kept, len(excluded))
                return True
            self._db.add("empty_batches")
            if self._db.count("empty_batches") >= self._policy.max_empty_batches:
                self._run.fail(self._empty_reason(step, excluded.values()))
                return False
        return False

    def _assign(self, step: int, kept: Sequence[int], consumed: int) -> None:
        self._db.sql.executemany(
            "UPDATE groups SET state = 'assigned', step = ? WHERE id = ?", [(step, group_id) for group_id in kept]
        )
        self._db.add("assigned", len(kept))
        self._db.add("consumed", consumed)
        self._db.put("assigned_step", step)
        self._db.put("empty_batches", 0)

    def _exclude(self, excluded: dict[int, str], step: int | None) -> None:
        self._db.sql.executemany(
            "UPDATE groups SET state = 'dropped', reason = ?, step = ? WHERE id = ?",
            [(reason, step, group_id) for group_id, reason in excluded.items()],
        )
        for reason in excluded.values():
            self._run.count_dropped(reason)

    def _empty_reason(self, step: int, reasons: Iterable[str]) -> str:
        return (
            f"{self._db.count('empty_batches')} batches in a row had no group to train step {step} on (the last: "
            f"{', '.join(sorted(set(reasons)))}). zero_variance: every attempt of a group gets the same reward, look "
            "at the rewards; over_age: raise maxStaleness or set overAge to keep"
        )

    def commit(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Mark a step as trained. Doing it again changes nothing.

        Raises:
            RefusedError: 409, a stale epoch; 422, the step has no batch yet or comes out of order.
        """
        self._check_epoch(epoch)
        now = self._run.now
        if step <= now.trained_step:
            return
        if step != now.trained_step + 1 or step > now.count("assigned_step"):
            raise RefusedError(
                422,
                f"step {step} cannot be committed: {now.trained_step} steps are trained and batches are made up to "
                f"step {now.count('assigned_step')}",
            )
        trained = self._db.sql.execute(
            "UPDATE groups SET state = 'trained' WHERE step = ? AND state = 'assigned'", (step,)
        ).rowcount
        consumed = self._db.sql.execute(
            "SELECT count(*) FROM groups WHERE step = ? AND state = 'dropped'", (step,)
        ).fetchone()[0]
        self._db.add("assigned", -trained)
        self._db.add("trained", trained)
        self._db.add("consumed", -consumed)
        self._db.put("trained_step", step)
        if metrics.get("skipped"):
            self._db.add("steps_skipped")
        self._db.facts["metrics"] = json.dumps(metrics)
        self._evaluation.step_done(step)
        self._run.end_if_done()

    def checkpoint(self, epoch: int, step: int, oldest_step: int) -> list[int]:
        """Note a durable checkpoint.

        Returns:
            Payload segments that nothing needs any more, to be deleted once this is durable.

        Raises:
            RefusedError: 409, a stale epoch; 422, ``oldest_step`` is above ``step``.
        """
        self._check_epoch(epoch)
        if oldest_step > step:
            raise RefusedError(422, f"checkpoint {step}: its oldest_step {oldest_step} is above it")
        self._db.put("checkpoint_step", step)
        self._db.put("payload_floor", max(oldest_step, self._db.count("payload_floor")))
        return self._forget_payloads()

    def _forget_payloads(self) -> list[int]:
        floor = self._db.count("payload_floor")
        gone = []
        for segment in self._payloads.closed_segments():
            needed = self._db.sql.execute(
                "SELECT 1 FROM groups WHERE segment = ? AND state != 'dropped' "
                "AND NOT (state = 'trained' AND step <= ?) LIMIT 1",
                (segment, floor),
            ).fetchone()
            if needed is None:
                self._db.sql.execute("UPDATE groups SET segment = NULL WHERE segment = ?", (segment,))
                gone.append(segment)
        return gone

    def shown(self, step: int | None, limit: int) -> list[ShownGroup]:
        """Find groups to show: those of ``step``, or the newest trained (or, before there are any, completed) ones."""
        columns = "SELECT state, step, segment, offset, length FROM groups"
        if step is not None:
            rows = self._db.sql.execute(
                f"{columns} WHERE step = ? AND state != 'dropped' AND segment IS NOT NULL ORDER BY id LIMIT ?",
                (step, limit),
            ).fetchall()
        else:
            rows = self._db.sql.execute(
                f"{columns} WHERE step <= ? AND state = 'trained' AND segment IS NOT NULL "
                "ORDER BY step DESC, id DESC LIMIT ?",
                (self._db.count("trained_step"), limit),
            ).fetchall()
            rows += self._db.sql.execute(
                f"{columns} WHERE state = 'completed' ORDER BY id DESC LIMIT ?", (limit - len(rows),)
            ).fetchall()
        return [ShownGroup(row[0], row[1], PayloadRef(*row[2:])) for row in rows]

    def _check_epoch(self, epoch: int) -> None:
        current = self._db.count("epoch")
        if epoch != current:
            raise RefusedError(409, f"epoch {epoch} is not current, {current} is: another trainer has started since")
