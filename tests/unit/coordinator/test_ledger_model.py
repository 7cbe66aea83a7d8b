"""Random lives of a ledger against a model of a few dictionaries."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight_runtime.coordinator.rollouts import Granted
from inflight_runtime.coordinator.run import RefusedError
from inflight_runtime.types import decode_group
from support.coordinators import Desk, coordinator_config

STEPS = 12
B = 2


@dataclass
class ModelGroup:
    problem: int
    fence: int = 1
    held: bool = True
    state: str = "leased"
    excluded: bool = False
    step: int | None = None


@dataclass
class Model:
    groups: dict[int, ModelGroup] = field(default_factory=dict)
    memberships: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    epoch: int = 0
    floor: int = 0

    def of(self, state: str) -> list[int]:
        return [group_id for group_id, group in self.groups.items() if group.state == state]

    @property
    def outstanding(self) -> int:
        waiting = sum(slots for step, slots in self.slots.items() if step > self.trained)
        return len(self.of("leased")) + len(self.of("completed")) + waiting


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 2),
        zero_variance=st.sampled_from(["keep", "drop", "refill"]),
        seed=st.integers(0, 3),
    )
    def begin(self, staleness: int, zero_variance: str, seed: int) -> None:
        self.root = Path(mkdtemp(prefix="ledger-"))
        self.lives = itertools.count()
        self.requests = itertools.count()
        self.changes = {
            "steps": STEPS,
            "groups_per_step": B,
            "max_staleness": staleness,
            "zero_variance": zero_variance,
            "max_empty_batches": 10**6,
            "seed": seed,
        }
        self.staleness, self.zero_variance = staleness, zero_variance
        self.model = Model()
        self.granted: list[Granted] = []
        self.here = self.root / str(next(self.lives))
        self.here.mkdir()
        self.desk = Desk.open(coordinator_config(self.here, **self.changes), segment_bytes=200)
        self.desk.announce(7)

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            self.desk.close()
            shutil.rmtree(self.root)

    # --- actors -------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6), cap=st.integers(0, 8), twice=st.booleans())
    def lease(self, count: int, cap: int, twice: bool) -> None:
        model = self.model
        before, held = model.outstanding, sum(group.held for group in model.groups.values())
        queued = sorted(g for g in model.of("leased") if not model.groups[g].held)
        request = f"request-{next(self.requests)}"
        grant = self.desk.lease(count, request=request, cap=cap)
        if twice:
            assert self.desk.lease(count, request=request, cap=cap).leases == grant.leases or not grant.leases
        if model.trained == STEPS:
            assert grant.finished
            return
        again = [lease for lease in grant.leases if lease.group_id in model.groups]
        fresh = [lease for lease in grant.leases if lease.group_id not in model.groups]
        assert [lease.group_id for lease in again] == queued[: len(again)]
        assert [lease.group_id for lease in fresh] == list(range(len(model.groups), len(model.groups) + len(fresh)))
        assert not fresh or len(again) == len(queued)
        assert len(grant.leases) <= count
        assert not grant.leases or held + len(grant.leases) <= cap
        assert not fresh or before + len(fresh) <= (self.staleness + 1) * B
        for lease in again:
            known = model.groups[lease.group_id]
            assert (lease.fence, lease.problem_index) == (known.fence, known.problem)
            known.held = True
        for lease in fresh:
            model.groups[lease.group_id] = ModelGroup(lease.problem_index)
        self.granted += grant.leases

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), kind=st.sampled_from(["good", "flat", "failed"]))
    def submit_some(self, data: st.DataObject, kind: str) -> None:
        self.submit(data.draw(st.sampled_from(self.granted)), kind)

    def submit(self, lease: Granted, kind: str) -> None:
        group = self.model.groups[lease.group_id]
        rewards = {"good": [0.0, 1.0], "flat": [1.0, 1.0], "failed": [1.0, None]}[kind]
        receipt = self.desk.submit(lease, rewards=rewards)
        if lease.fence != group.fence:
            assert receipt.status == 409
        elif group.state != "leased":
            assert receipt.status == 200
        else:
            assert receipt.status == 201
            group.held = False
            returned = kind == "failed" or (kind == "flat" and self.zero_variance == "refill")
            group.state = "dropped" if returned else "completed"
            group.excluded = kind == "flat" and self.zero_variance == "drop"
            assert receipt.state == ("dropped" if returned or group.excluded else "completed")

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.granted))
        group = self.model.groups[lease.group_id]
        receipt = self.desk.drop(lease, "attempts_failed")
        if lease.fence == group.fence and group.state == "leased":
            assert receipt.status == 201
            group.held, group.state = False, "dropped"
        else:
            assert receipt.status in {200, 409}

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), expired=st.booleans())
    def take_back(self, data: st.DataObject, expired: bool) -> None:
        leases = data.draw(st.lists(st.sampled_from(self.granted), max_size=4))
        self.desk.requeue(*leases, expired=expired)
        for lease in leases:
            group = self.model.groups[lease.group_id]
            if group.state == "leased" and group.held and group.fence == lease.fence:
                group.held, group.fence = False, group.fence + 1

    # --- trainer ------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def start_trainer(self, data: st.DataObject) -> None:
        model = self.model
        made = max(model.memberships, default=0)
        step = data.draw(st.integers(model.floor, max(model.floor, made)))
        epoch = self.desk.start(step)
        model.epoch += 1
        assert epoch == model.epoch
        if self.staleness == 0 and step < model.trained:
            for group in model.groups.values():
                if group.state == "leased" and group.held:
                    group.held, group.fence = False, group.fence + 1
        for group in model.groups.values():
            if group.step is not None and group.state in {"assigned", "trained"}:
                group.state = "trained" if group.step <= step else "assigned"
        model.trained = step

    @precondition(lambda self: self.model.epoch)
    @rule()
    def next_batch(self) -> None:
        model = self.model
        step = max(model.memberships, default=0) + 1
        if step > STEPS:
            return
        plan = self.desk.batch(step, model.epoch)
        while len(ready := sorted(model.of("completed"))[:B]) == B:
            kept = [group_id for group_id in ready if not model.groups[group_id].excluded]
            for group_id in ready:
                model.groups[group_id].state = "assigned" if group_id in kept else "dropped"
                model.groups[group_id].step = step if kept else None
            if kept:
                assert plan is not None
                assert plan.groups == kept
                assert sum(plan.excluded.values()) == B - len(kept)
                model.memberships[step], model.slots[step] = kept, B
                return
        assert plan is None

    @precondition(lambda self: self.model.memberships)
    @rule(data=st.data())
    def same_batch_again(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model.memberships)))
        if step <= self.model.floor:
            return
        plan = self.desk.batch(step, self.model.epoch)
        assert plan.groups == self.model.memberships[step]
        assert [decode_group(self.desk.payloads.read(ref)).group_id for ref in plan.refs] == plan.groups

    @precondition(lambda self: max(self.model.memberships, default=0) > self.model.trained)
    @rule(twice=st.booleans())
    def commit(self, twice: bool) -> None:
        model = self.model
        step = model.trained + 1
        for _ in range(1 + twice):
            self.desk.commit(step, model.epoch)
        for group_id in model.memberships[step]:
            model.groups[group_id].state = "trained"
        model.trained = step

    @precondition(lambda self: self.model.epoch > 1)
    @rule(data=st.data())
    def a_stale_trainer_speaks(self, data: st.DataObject) -> None:
        epoch = data.draw(st.integers(0, self.model.epoch - 1))
        for call in (
            lambda: self.desk.batch(1, epoch),
            lambda: self.desk.commit(self.model.trained + 1, epoch),
            lambda: self.desk.checkpoint(1, 1, epoch),
        ):
            with pytest.raises(RefusedError) as refusal:
                call()
            assert refusal.value.status == 409

    @precondition(lambda self: self.model.trained)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        oldest = data.draw(st.integers(0, self.model.trained))
        self.desk.checkpoint(self.model.trained, oldest, self.model.epoch)
        self.model.floor = max(self.model.floor, oldest)

    @precondition(lambda self: self.model.epoch)
    @rule(steps=st.integers(1, 4), kinds=st.lists(st.sampled_from(["good", "good", "flat"]), min_size=2, max_size=5))
    def train_a_while(self, steps: int, kinds: list[str]) -> None:
        kind = itertools.cycle(kinds)
        for _ in range(steps):
            if max(self.model.memberships, default=0) == self.model.trained:
                self.lease(count=2 * B, cap=100, twice=False)
                for lease in self.granted:
                    if self.model.groups[lease.group_id].state == "leased":
                        self.submit(lease, next(kind))
                self.next_batch()
            if max(self.model.memberships, default=0) > self.model.trained:
                self.commit(twice=False)

    # --- faults -------------------------------------------------------------------------------------------------------

    @rule()
    def kill_and_reopen(self) -> None:
        # What kill -9 leaves: the files as they are, the write-ahead log not folded in.
        there = self.root / str(next(self.lives))
        shutil.copytree(self.here, there)
        self.desk.close()
        self.here = there
        self.desk = Desk.open(coordinator_config(there, **self.changes), segment_bytes=200)

    @rule(count=st.integers(1, 4))
    def a_transaction_fails(self, count: int) -> None:
        def leases_and_fails() -> Any:
            with self.desk.ledger.transaction():
                self.desk.ledger.rollouts.lease("actor", f"request-{next(self.requests)}", count, 64, None)
                raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space"):
            leases_and_fails()

    # --- what must always hold ----------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.desk.ledger.audit()
        now, model = self.desk.ledger.run.now, self.model
        counted = Counter(group.state for group in model.groups.values())
        assert now.states == {"submitted": len(model.groups)} | {
            state: counted[state] for state in ("leased", "completed", "assigned", "trained", "dropped")
        }
        assert now.load.outstanding == model.outstanding
        assert now.load.held == sum(group.held for group in model.groups.values())
        assert sum(now.dropped.values()) == counted["dropped"]
        assert (now.trained_step, now.epoch) == (model.trained, model.epoch)

    @invariant()
    def no_group_is_trained_twice_in_the_surviving_history(self) -> None:
        if not hasattr(self, "desk"):
            return
        history = [g for step, groups in self.model.memberships.items() if step <= self.model.trained for g in groups]
        assert len(history) == len(set(history)) == self.desk.states["trained"]


LedgerMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestLedgerAgainstAModel = LedgerMachine.TestCase
