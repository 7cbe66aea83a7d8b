"""The actors' side of the ledger: leases, results, drops. Runs inside a transaction that the caller opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from inflight_runtime.coordinator import admission
from inflight_runtime.coordinator.evaluation import EVALUATION_BASE, EvaluationBook
from inflight_runtime.coordinator.inspection import Submission
from inflight_runtime.coordinator.payloads import PayloadStore
from inflight_runtime.coordinator.run import RefusedError, Run
from inflight_runtime.coordinator.sampler import ExhaustedError, Sampler
from inflight_runtime.types import Version

ENDLESS_TOO_LONG: Final = 1000
"""Over-long prompts in a row after which an endless environment counts as exhausted."""


@dataclass(frozen=True, slots=True)
class Granted:
    """One lease given out."""

    group_id: int
    fence: int
    problem_index: int
    kind: Literal["train", "eval"]
    attempts: int
    min_version: Version


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a lease request."""

    leases: list[Granted] = field(default_factory=list)
    finished: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a submitted or given-up group; ``status``: 201 taken, 200 duplicate, 409 fenced off."""

    status: int
    state: Literal["completed", "dropped", "evaluated"]
    reason: str = ""


class Rollouts:
    """Groups from their lease to ``completed`` (or ``dropped``), and the sampler's position."""

    def __init__(
        self, run: Run, payloads: PayloadStore, evaluation: EvaluationBook, *, shuffle: bool, seed: int
    ) -> None:
        self._run = run
        self._db = run.db
        self._policy = run.policy
        self._payloads = payloads
        self._evaluation = evaluation
        self._shuffle = shuffle
        self._seed = seed
        self.reload()

    def reload(self) -> None:
        """Read again what is kept in memory (after a transaction was taken back)."""
        self._sampler: Sampler | None = None
        self._excluded = {row[0] for row in self._db.sql.execute("SELECT problem FROM excluded_problems")}

    def held(self) -> list[tuple[int, int, str]]:
        """Leases that somebody holds: (group id, fence, actor id)."""
        return [
            *self._db.sql.execute("SELECT id, fence, owner FROM groups WHERE state = 'leased' AND owner IS NOT NULL"),
            *self._evaluation.held(),
        ]

    def lease(self, actor_id: str, request_id: str, max_groups: int, cap: int, served: Version | None) -> Grant:
        """Lease groups: those of an earlier try of the same request, evaluation, re-queued ones, then new ones.

        Args:
            actor_id: who asks.
            request_id: names the request; a repeated one gets the same leases again.
            max_groups: the most to give.
            cap: C, how many groups the servers generate at once.
            served: the newest version that a usable server has; ``None`` without one.
        """
        now = self._run.now
        if now.finished:
            return Grant(finished=True, reason=now.reason or now.outcome)
        again = [*self._repeat(actor_id, request_id), *self._evaluation.repeat(actor_id, request_id)]
        if again:
            return Grant([self._granted(*row) for row in again])
        dataset = now.record("dataset")
        if not dataset:
            return Grant(reason="no actor has announced its dataset yet")
        rows = self._evaluation.lease(actor_id, request_id, max_groups, served, dataset["eval_size"])
        room = admission.room(self._policy, now.load, cap)
        rows += self._lease_requeued(actor_id, request_id, min(room.requeued, max_groups - len(rows)))
        try:
            rows += self._lease_new(actor_id, request_id, min(room.new, max_groups - len(rows)), dataset["size"])
        except ExhaustedError as error:
            self._run.fail(f"{error}: every prompt is longer than the model and its maxTokens allow")
            return Grant(finished=True, reason=self._run.now.reason)
        return Grant([self._granted(*row) for row in rows], reason="" if rows else room.reason)

    def _repeat(self, actor_id: str, request_id: str) -> list[tuple[int, int, int]]:
        return self._db.sql.execute(
            "SELECT id, fence, problem FROM groups WHERE state = 'leased' AND request = ? AND owner = ? ORDER BY id",
            (request_id, actor_id),
        ).fetchall()

    def _lease_requeued(self, actor_id: str, request_id: str, limit: int) -> list[tuple[int, int, int]]:
        if limit <= 0:
            return []
        rows: list[tuple[int, int, int]] = self._db.sql.execute(
            "SELECT id, fence, problem FROM groups WHERE state = 'leased' AND owner IS NULL ORDER BY id LIMIT ?",
            (limit,),
        ).fetchall()
        self._db.sql.executemany(
            "UPDATE groups SET owner = ?, request = ? WHERE id = ?", [(actor_id, request_id, row[0]) for row in rows]
        )
        self._db.add("requeued", -len(rows))
        return rows

    def _lease_new(self, actor_id: str, request_id: str, limit: int, size: int | None) -> list[tuple[int, int, int]]:
        if limit <= 0:
            return []
        if self._sampler is None:
            self._sampler = Sampler(size, shuffle=self._shuffle, seed=self._seed)
        position = self._db.count("position")
        first = self._db.count("next_group")
        rows = []
        for group_id in range(first, first + limit):
            problem, position = self._sampler.draw(position, self._excluded)
            rows.append((group_id, 1, problem))
        self._db.sql.executemany(
            "INSERT INTO groups (id, fence, problem, state, owner, request) VALUES (?, ?, ?, 'leased', ?, ?)",
            [(*row, actor_id, request_id) for row in rows],
        )
        self._db.put("position", position)
        self._db.put("next_group", first + limit)
        self._db.add("submitted", limit)
        self._db.add("leased", limit)
        return rows

    def _granted(self, group_id: int, fence: int, problem: int) -> Granted:
        now = self._run.now
        if group_id >= EVALUATION_BASE:
            return Granted(
                group_id, fence, problem, "eval", self._evaluation.attempts, Version(now.epoch, self._evaluation.step)
            )
        strict = self._policy.max_staleness == 0
        minimum = Version(now.epoch, now.count("assigned_step")) if strict else Version(0, 0)
        return Granted(group_id, fence, problem, "train", self._policy.group_size, minimum)

    def requeue(self, leases: Iterable[tuple[int, int]], *, expired: bool) -> None:
        """Take leases back: the same group with the next fence. Those that are not held any more are skipped."""
        for group_id, fence in leases:
            if group_id >= EVALUATION_BASE:
                taken = self._evaluation.requeue(group_id, fence)
            else:
                taken = self._db.sql.execute(
                    "UPDATE groups SET fence = fence + 1, owner = NULL, request = NULL "
                    "WHERE id = ? AND fence = ? AND state = 'leased' AND owner IS NOT NULL",
                    (group_id, fence),
                ).rowcount
                self._db.add("requeued", taken)
            if expired:
                self._db.add("leases_expired", taken)

    def submit(self, submission: Submission) -> Receipt:
        """Take a finished group.

        Raises:
            RefusedError: 404, no such group; 422, it is not what was leased.
        """
        if submission.group_id >= EVALUATION_BASE:
            status = self._evaluation.submit(submission)
            self._count_refusal(status)
            return Receipt(status, "evaluated")
        settled = self._settled(submission.group_id, submission.fence, submission.problem_index)
        if settled is not None:
            self._count_refusal(settled.status)
            return settled
        if submission.attempts != self._policy.group_size:
            raise RefusedError(
                422,
                f"group {submission.group_id} has {submission.attempts} attempts, this job's groupSize is "
                f"{self._policy.group_size}",
            )
        self._db.add("attempts_failed", submission.failed)
        self._db.put("too_long", 0)
        verdict = admission.judge(self._policy, len(submission.rewards), submission.rewards)
        if verdict.dropped:
            self._drop_leased(submission.group_id, verdict.dropped)
            return Receipt(201, "dropped", verdict.dropped)
        ref = self._payloads.append(submission.payload)
        self._db.sql.execute(
            "UPDATE groups SET state = 'completed', owner = NULL, request = NULL, reason = ?, oldest_step = ?, "
            "segment = ?, offset = ?, length = ? WHERE id = ?",
            (verdict.excluded or None, submission.oldest_step, *ref, submission.group_id),
        )
        self._db.add("leased", -1)
        self._db.add("completed")
        return Receipt(201, "dropped" if verdict.excluded else "completed", verdict.excluded)

    def drop(self, group_id: int, fence: int, reason: str) -> Receipt:
        """Give up a leased group; its slot is returned and an over-long problem is not drawn again.

        Raises:
            RefusedError: 404, no such group.
        """
        if group_id >= EVALUATION_BASE:
            status = self._evaluation.drop(group_id, fence)
            self._count_refusal(status)
            return Receipt(status, "evaluated")
        settled = self._settled(group_id, fence, None)
        if settled is not None:
            if settled.status == 200 and settled.reason != reason:
                settled = Receipt(409, settled.state, settled.reason)
            self._count_refusal(settled.status)
            return settled
        if reason == admission.PROMPT_TOO_LONG:
            self._exclude_problem(group_id)
        else:
            self._db.add("attempts_failed", self._policy.group_size)
        self._drop_leased(group_id, reason)
        return Receipt(201, "dropped", reason)

    def _settled(self, group_id: int, fence: int, problem: int | None) -> Receipt | None:
        """Answer for a result that must not be taken (a duplicate, or fenced off); ``None``: take it."""
        row = self._db.sql.execute(
            "SELECT state, fence, reason, problem FROM groups WHERE id = ?", (group_id,)
        ).fetchone()
        if row is None:
            raise RefusedError(404, f"no group {group_id} was ever leased: is this another run's actor?")
        state, current, reason, index = row
        if fence != current:
            return Receipt(409, "dropped", f"fence {fence}, the group is at fence {current}")
        if problem is not None and problem != index:
            raise RefusedError(422, f"group {group_id} was leased for problem {index}, not {problem}")
        if state == "leased":
            return None
        return Receipt(200, "dropped" if reason else "completed", reason or "")

    def _count_refusal(self, status: int) -> None:
        if status == 200:
            self._db.add("duplicates")
        elif status == 409:
            self._db.add("fenced")

    def _drop_leased(self, group_id: int, reason: str) -> None:
        self._db.sql.execute(
            "UPDATE groups SET state = 'dropped', reason = ?, owner = NULL, request = NULL WHERE id = ?",
            (reason, group_id),
        )
        self._db.add("leased", -1)
        self._run.count_dropped(reason)

    def _exclude_problem(self, group_id: int) -> None:
        problem = self._db.sql.execute("SELECT problem FROM groups WHERE id = ?", (group_id,)).fetchone()[0]
        self._db.sql.execute("INSERT OR IGNORE INTO excluded_problems VALUES (?)", (problem,))
        self._excluded.add(problem)
        self._db.add("too_long")
        if self._run.now.record("dataset").get("size") is None and self._db.count("too_long") >= ENDLESS_TOO_LONG:
            self._run.fail(
                f"the last {ENDLESS_TOO_LONG} prompts of the endless environment were all longer than the model and "
                "its maxTokens allow",
            )
