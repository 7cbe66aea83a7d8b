"""Held-out evaluation: leased with priority, scored, never trained on and outside of the ledger's accounting."""

from __future__ import annotations

import json
from typing import Final

from inflight_runtime.config.roles import Evaluation
from inflight_runtime.coordinator.database import Database
from inflight_runtime.coordinator.inspection import Submission
from inflight_runtime.types import Version

EVALUATION_BASE: Final = 1_000_000_000
"""Evaluation groups are numbered from here, so that training's group ids do not depend on when evaluation ran."""


class EvaluationBook:
    """At most one evaluation at a time, kept in the ledger's database and transactions.

    It falls due at step 0 and at every multiple of ``every_steps``, waits until a server serves that step's weights,
    and ends when all its groups are in. One that falls due while another is under way is left out.
    """

    def __init__(self, db: Database, config: Evaluation | None) -> None:
        self._db = db
        self._config = config

    @property
    def attempts(self) -> int:
        """Attempts per prompt."""
        return self._config.attempts if self._config else 1

    @property
    def step(self) -> int:
        """The step that is being evaluated (only while one is under way)."""
        return self._db.count("evaluation_step")

    @property
    def under_way(self) -> bool:
        """Whether an evaluation is due or running."""
        return bool(self._db.count("evaluation_pending"))

    def step_done(self, step: int) -> None:
        """Take note that a step is trained."""
        if self._config is None or step % self._config.every_steps or self.under_way:
            return
        self._db.put("evaluation_pending", 1)
        self._db.put("evaluation_step", step)

    def restart(self, step: int) -> None:
        """A trainer starts at ``step``: an evaluation of weights that may be gone is given up."""
        self._cancel()
        text = self._db.facts.get("evaluation")
        done = json.loads(text)["step"] if text else -1
        if done != step:
            self.step_done(step)

    def _cancel(self) -> None:
        self._db.sql.execute("DELETE FROM evaluation_groups")
        self._db.put("evaluation_pending", 0)
        self._db.put("evaluation_open", 0)
        self._db.put("evaluation_made", 0)

    def lease(
        self, actor_id: str, request_id: str, limit: int, served: Version | None, available: int | None
    ) -> list[tuple[int, int, int]]:
        """Lease evaluation groups: (group id, fence, problem index).

        Args:
            actor_id: who asks.
            request_id: names the request.
            limit: the most to give.
            served: the newest version that a usable server has.
            available: held-out problems there are; ``None`` when the environment did not say.
        """
        if self._config is None or not self.under_way or served is None:
            return []
        if served < Version(self._db.count("epoch"), self.step):
            return []
        if not self._db.count("evaluation_made"):
            self._make(self._config.prompts if available is None else min(self._config.prompts, available))
        rows: list[tuple[int, int, int]] = self._db.sql.execute(
            "SELECT id, fence, problem FROM evaluation_groups WHERE owner IS NULL AND outcome IS NULL "
            "ORDER BY id LIMIT ?",
            (limit,),
        ).fetchall()
        self._db.sql.executemany(
            "UPDATE evaluation_groups SET owner = ?, request = ? WHERE id = ?",
            [(actor_id, request_id, row[0]) for row in rows],
        )
        self._db.add("evaluation_open", -len(rows))
        return rows

    def _make(self, prompts: int) -> None:
        if prompts == 0:
            self._cancel()
            return
        first = EVALUATION_BASE + self._db.count("next_evaluation")
        self._db.sql.executemany(
            "INSERT INTO evaluation_groups (id, problem, fence) VALUES (?, ?, 1)",
            [(first + index, index) for index in range(prompts)],
        )
        self._db.add("next_evaluation", prompts)
        self._db.put("evaluation_open", prompts)
        self._db.put("evaluation_made", prompts)

    def repeat(self, actor_id: str, request_id: str) -> list[tuple[int, int, int]]:
        """Leases that an earlier try of the same request got."""
        if not self.under_way:
            return []
        return self._db.sql.execute(
            "SELECT id, fence, problem FROM evaluation_groups WHERE request = ? AND owner = ? ORDER BY id",
            (request_id, actor_id),
        ).fetchall()

    def held(self) -> list[tuple[int, int, str]]:
        """Leases that somebody holds: (group id, fence, actor id)."""
        return self._db.sql.execute("SELECT id, fence, owner FROM evaluation_groups WHERE owner IS NOT NULL").fetchall()

    def requeue(self, group_id: int, fence: int) -> int:
        """Take a lease back; returns how many (0 or 1) it was."""
        taken = self._db.sql.execute(
            "UPDATE evaluation_groups SET fence = fence + 1, owner = NULL, request = NULL "
            "WHERE id = ? AND fence = ? AND owner IS NOT NULL",
            (group_id, fence),
        ).rowcount
        self._db.add("evaluation_open", taken)
        return taken

    def submit(self, submission: Submission) -> int:
        """Take scores; returns 201, 200 for a duplicate (or an evaluation that is over), 409 when fenced off."""
        means = {}
        for name in sorted({name for parts in submission.parts for name in parts}):
            values = [parts[name] for parts in submission.parts if name in parts]
            means[name] = [sum(values), len(values)]
        outcome = {"rewards": submission.rewards, "failed": submission.failed, "parts": means}
        return self._settle(submission.group_id, submission.fence, json.dumps(outcome))

    def drop(self, group_id: int, fence: int) -> int:
        """Leave a problem out of the evaluation; returns a status as :meth:`submit` does."""
        return self._settle(group_id, fence, json.dumps({"rewards": [], "failed": self.attempts, "parts": {}}))

    def _settle(self, group_id: int, fence: int, outcome: str) -> int:
        row = self._db.sql.execute(
            "SELECT fence, outcome, owner FROM evaluation_groups WHERE id = ?", (group_id,)
        ).fetchone()
        if row is None:
            return 200
        if row[0] != fence:
            return 409
        if row[1] is not None:
            return 200
        self._db.sql.execute(
            "UPDATE evaluation_groups SET outcome = ?, owner = NULL, request = NULL WHERE id = ?", (outcome, group_id)
        )
        left = self._db.sql.execute("SELECT 1 FROM evaluation_groups WHERE outcome IS NULL LIMIT 1").fetchone()
        if left is None:
            self._close()
        return 201

    def _close(self) -> None:
        """Average over attempts and make it the run's newest evaluation."""
        rewards: list[float] = []
        failed = 0
        parts: dict[str, list[float]] = {}
        for (text,) in self._db.sql.execute("SELECT outcome FROM evaluation_groups").fetchall():
            outcome = json.loads(text)
            rewards += outcome["rewards"]
            failed += outcome["failed"]
            for name, (total, number) in outcome["parts"].items():
                entry = parts.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += number
        result = {name: total / number for name, (total, number) in parts.items()}
        result |= {"step": float(self.step), "attempts": float(len(rewards)), "attempts_failed": float(failed)}
        if rewards:
            result["reward_mean"] = sum(rewards) / len(rewards)
        self._db.facts["evaluation"] = json.dumps(result)
        self._cancel()
