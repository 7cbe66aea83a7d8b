from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.coordinator.database import LedgerDamagedError
from inflight_runtime.coordinator.payloads import PayloadError
from inflight_runtime.coordinator.run import RefusedError
from inflight_runtime.types import Version, decode_group
from support.coordinators import Desk, coordinator_config


@pytest.fixture
def opened() -> Iterator[list[Desk]]:
    desks: list[Desk] = []
    yield desks
    for desk in desks:
        desk.close()


@pytest.fixture
def make(tmp_path: Path, opened: list[Desk]) -> Any:
    def make_desk(*, announced: bool = True, segment_bytes: int = 1 << 20, **changes: Any) -> Desk:
        desk = Desk.open(coordinator_config(tmp_path, **changes), segment_bytes=segment_bytes)
        opened.append(desk)
        if announced:
            desk.announce()
        return desk

    return make_desk


def run_steps(desk: Desk, first: int, last: int, epoch: int = 1) -> None:
    for step in range(first, last + 1):
        for lease in desk.lease(2).leases:
            desk.submit(lease, step=step - 1)
        assert desk.batch(step, epoch) is not None
        desk.commit(step, epoch)


def test_a_group_goes_from_its_lease_to_trained_and_the_states_add_up(make: Any) -> None:
    desk = make()
    desk.start()
    leases = desk.lease(2).leases
    assert desk.states == {"submitted": 2, "leased": 2, "completed": 0, "assigned": 0, "trained": 0, "dropped": 0}
    receipts = [desk.submit(lease) for lease in leases]
    assert [(receipt.status, receipt.state) for receipt in receipts] == [(201, "completed")] * 2
    assert desk.states["completed"] == 2
    plan = desk.batch(1)
    assert desk.states["assigned"] == 2
    assert [decode_group(desk.payloads.read(ref)).group_id for ref in plan.refs] == plan.groups == [0, 1]
    desk.commit(1)
    assert desk.states == {"submitted": 2, "leased": 0, "completed": 0, "assigned": 0, "trained": 2, "dropped": 0}


def test_without_a_dataset_nothing_is_leased_and_another_size_is_refused(make: Any) -> None:
    desk = make(announced=False)
    grant = desk.lease(2)
    assert grant.leases == []
    assert "dataset" in grant.reason
    desk.announce(10)
    desk.announce(10)
    with pytest.raises(RefusedError, match="all actors of a job must load the same") as refusal:
        desk.announce(11)
    assert refusal.value.status == 409


def test_a_repeated_request_gets_the_same_leases(make: Any) -> None:
    desk = make()
    first = desk.lease(2, request="one")
    assert desk.lease(2, request="one") == first
    assert [lease.group_id for lease in desk.lease(2, request="two").leases] == [2, 3]
    assert desk.states["leased"] == 4


def test_leases_stop_at_the_staleness_bound_and_at_the_cap(make: Any) -> None:
    desk = make(max_staleness=1)
    assert len(desk.lease(100, cap=3).leases) == 3
    assert len(desk.lease(100).leases) == 1
    assert desk.lease(100).reason == "staleness bound"


def test_no_more_is_leased_than_the_run_still_needs(make: Any) -> None:
    desk = make(steps=2, max_staleness=5)
    desk.start()
    leases = desk.lease(100).leases
    assert len(leases) == 4
    for lease in leases:
        desk.submit(lease)
    assert "enough" in desk.lease(1).reason
    desk.batch(1)
    desk.commit(1)
    desk.batch(2)
    assert desk.lease(1).leases == []
    desk.commit(2)
    finished = desk.lease(1)
    assert finished.finished
    assert finished.reason == "succeeded"


def test_a_duplicate_is_answered_as_before_and_counted_once(make: Any) -> None:
    desk = make()
    lease = desk.lease(1).leases[0]
    desk.submit(lease)
    again = desk.submit(lease)
    assert (again.status, again.state) == (200, "completed")
    assert desk.states["completed"] == 1
    assert desk.ledger.run.now.count("duplicates") == 1


def test_an_expired_lease_is_given_out_again_with_the_next_fence_before_new_ones(make: Any) -> None:
    desk = make()
    first, second = desk.lease(2).leases
    desk.requeue(first)
    assert desk.submit(first).status == 409
    assert desk.ledger.run.now.count("fenced") == 1
    again, fresh = desk.lease(2, actor="actor-1").leases
    assert (again.group_id, again.problem_index, again.fence) == (first.group_id, first.problem_index, 2)
    assert fresh.group_id == 2
    assert desk.submit(first).status == 409
    assert desk.submit(again).status == 201
    assert desk.submit(first).status == 409
    assert desk.submit(second).status == 201
    assert desk.ledger.run.now.count("leases_expired") == 1


def test_a_released_lease_is_not_counted_as_expired(make: Any) -> None:
    desk = make()
    lease = desk.lease(1).leases[0]
    desk.requeue(lease, expired=False)
    desk.requeue(lease, expired=False)
    assert desk.ledger.run.now.count("leases_expired") == 0
    assert desk.ledger.run.now.load.held == 0
    assert desk.states["leased"] == 1


def test_a_result_for_what_was_never_leased_is_refused(make: Any) -> None:
    desk = make()
    lease = desk.lease(1).leases[0]
    with pytest.raises(RefusedError, match="another run's actor") as unknown:
        desk.submit(type(lease)(99, 1, 0, "train", 2, Version(0, 0)))
    with pytest.raises(RefusedError, match="was leased for problem") as other:
        desk.submit(type(lease)(lease.group_id, 1, lease.problem_index + 1, "train", 2, Version(0, 0)))
    with pytest.raises(RefusedError, match="groupSize is 2") as size:
        desk.submit(lease, rewards=[1.0, 0.0, 1.0])
    assert [refusal.value.status for refusal in (unknown, other, size)] == [404, 422, 422]
    assert desk.states["leased"] == 1


def test_a_group_with_fewer_than_two_survivors_returns_its_slot(make: Any) -> None:
    desk = make()
    lease = desk.lease(1).leases[0]
    receipt = desk.submit(lease, rewards=[1.0, None])
    assert (receipt.state, receipt.reason) == ("dropped", "attempts_failed")
    assert desk.ledger.run.now.count("attempts_failed") == 1
    assert desk.ledger.run.now.load.outstanding == 0
    assert desk.ledger.run.now.dropped == {"attempts_failed": 1}
    assert desk.submit(lease, rewards=[1.0, None]).status == 200


def test_dropping_is_idempotent_and_fenced(make: Any) -> None:
    desk = make()
    lease, other = desk.lease(2).leases
    assert desk.drop(lease, "attempts_failed").status == 201
    assert desk.drop(lease, "attempts_failed").status == 200
    assert desk.ledger.run.now.count("attempts_failed") == 2
    desk.submit(other)
    assert desk.drop(other, "attempts_failed").status == 409
    assert desk.states["dropped"] == 1


def test_an_over_long_problem_is_not_drawn_again(make: Any) -> None:
    desk = make(announced=False, shuffle=False, max_staleness=5)
    desk.announce(3)
    leases = desk.lease(3).leases
    desk.drop(leases[1], "prompt_too_long")
    assert [lease.problem_index for lease in desk.lease(4).leases] == [0, 2, 0, 2]


def test_the_run_fails_when_every_problem_is_too_long(make: Any) -> None:
    desk = make(announced=False)
    desk.announce(2)
    for lease in desk.lease(2).leases:
        desk.drop(lease, "prompt_too_long")
    grant = desk.lease(1)
    assert grant.finished
    assert "all 2 problems" in grant.reason
    assert desk.ledger.run.now.outcome == "failed"


def test_an_endless_environment_of_over_long_prompts_fails_as_well(make: Any) -> None:
    desk = make(announced=False, max_staleness=600)
    desk.announce(None)
    with desk.ledger.transaction():
        while not (grant := desk.ledger.rollouts.lease("actor", "request", 64, 64, None)).finished:
            for lease in grant.leases:
                desk.ledger.rollouts.drop(lease.group_id, lease.fence, "prompt_too_long")
    assert "1000 prompts" in desk.ledger.run.now.reason


def test_refilled_groups_return_their_slot_and_dropped_ones_shrink_the_batch(make: Any, tmp_path: Path) -> None:
    desk = make(zero_variance="refill")
    receipt = desk.submit(desk.lease(1).leases[0], rewards=[1.0, 1.0])
    assert (receipt.state, receipt.reason) == ("dropped", "zero_variance")
    assert desk.ledger.run.now.load.outstanding == 0
    desk.close()
    shutil.rmtree(tmp_path / "coordinator")

    other = make(zero_variance="drop")
    other.start()
    same, different = other.lease(2).leases
    receipt = other.submit(same, rewards=[1.0, 1.0])
    assert (receipt.state, receipt.reason) == ("dropped", "zero_variance")
    assert other.states["completed"] == 1
    other.submit(different)
    plan = other.batch(1)
    assert (plan.groups, plan.excluded) == ([different.group_id], {"zero_variance": 1})
    assert other.ledger.run.now.load.outstanding == 2, "the slot stays used until the step is trained"
    other.commit(1)
    assert other.ledger.run.now.load.outstanding == 0
    assert other.states == {"submitted": 2, "leased": 0, "completed": 0, "assigned": 0, "trained": 1, "dropped": 1}


def test_groups_older_than_the_bound_are_dropped_when_asked(make: Any) -> None:
    desk = make(over_age="drop", max_staleness=1)
    desk.start()
    late, early = desk.lease(2).leases
    run = desk.lease(2).leases
    for lease in run:
        desk.submit(lease, step=0)
    assert desk.batch(1).groups == [lease.group_id for lease in run]
    desk.commit(1)
    for lease in desk.lease(2).leases:
        desk.submit(lease, step=1)
    desk.batch(2)
    desk.commit(2)
    desk.submit(late, step=0)
    desk.submit(early, step=1)
    plan = desk.batch(3)
    assert (plan.groups, plan.excluded) == ([early.group_id], {"over_age": 1})


def test_a_batch_takes_the_oldest_completed_groups_and_waits_for_no_straggler(make: Any) -> None:
    desk = make()
    desk.start()
    first, second, third, fourth = desk.lease(4).leases
    desk.submit(fourth)
    assert desk.batch(1) is None
    desk.submit(third)
    desk.submit(second)
    assert desk.batch(1).groups == [second.group_id, third.group_id]
    desk.submit(first)
    assert desk.batch(2).groups == [first.group_id, fourth.group_id]


def test_an_empty_batch_is_replaced_and_too_many_of_them_end_the_run(make: Any) -> None:
    desk = make(zero_variance="drop", max_empty_batches=2)
    desk.start()
    for lease in desk.lease(2).leases:
        desk.submit(lease, rewards=[0.0, 0.0])
    assert desk.batch(1) is None
    assert desk.ledger.run.now.outcome == "running"
    for lease in desk.lease(2).leases:
        desk.submit(lease)
    plan = desk.batch(1)
    assert plan.excluded == {}
    desk.commit(1)
    for _ in range(2):
        for lease in desk.lease(2).leases:
            desk.submit(lease, rewards=[0.0, 0.0])
        assert desk.batch(2) is None
    assert desk.ledger.run.now.outcome == "failed"
    assert "zero_variance" in desk.ledger.run.now.reason
    with pytest.raises(RefusedError, match="2 batches in a row") as refusal:
        desk.batch(2)
    assert refusal.value.status == 410
    assert desk.lease(1).finished
    desk.ledger.audit()


def test_a_step_keeps_its_groups_over_trainer_restarts(make: Any) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 3)
    before = [desk.batch(step).groups for step in (2, 3)]
    epoch = desk.start(1)
    assert epoch == 2
    assert desk.states["assigned"] == 4
    assert [desk.batch(step, epoch).groups for step in (2, 3)] == before
    desk.commit(2, epoch)
    desk.commit(3, epoch)
    assert desk.states["trained"] == 6
    desk.ledger.audit()


def test_a_stale_epoch_is_refused_everywhere(make: Any) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 1)
    desk.start(1)
    for call in (lambda: desk.batch(1, 1), lambda: desk.commit(1, 1), lambda: desk.checkpoint(1, 1, 1)):
        with pytest.raises(RefusedError, match="epoch 1 is not current, 2 is") as refusal:
            call()
        assert refusal.value.status == 409


def test_a_checkpoint_written_before_its_commit_arrived_counts(make: Any) -> None:
    desk = make()
    desk.start()
    for lease in desk.lease(2).leases:
        desk.submit(lease)
    desk.batch(1)
    desk.start(1)
    assert desk.states["trained"] == 2
    assert desk.ledger.run.now.trained_step == 1


def test_commits_are_idempotent_and_in_order(make: Any) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 1)
    desk.commit(1)
    assert desk.states["trained"] == 2
    with pytest.raises(RefusedError, match="cannot be committed"):
        desk.commit(2)
    with pytest.raises(RefusedError, match="ask in order"):
        desk.batch(3)
    with pytest.raises(RefusedError, match="there is no step 11"):
        desk.batch(11)


def test_the_last_commit_ends_the_run_and_a_trainer_that_goes_back_reopens_it(make: Any) -> None:
    desk = make(steps=2)
    desk.start()
    run_steps(desk, 1, 2)
    assert desk.ledger.run.now.outcome == "succeeded"
    epoch = desk.start(1)
    assert desk.ledger.run.now.outcome == "running"
    desk.batch(2, epoch)
    desk.commit(2, epoch)
    assert desk.ledger.run.now.outcome == "succeeded"
    assert desk.start(2) == 3
    assert desk.ledger.run.now.outcome == "succeeded"


def test_the_first_failure_is_the_reason(make: Any) -> None:
    desk = make()
    with desk.ledger.transaction():
        desk.ledger.run.fail("the environment always raises")
        desk.ledger.run.fail("and then something else")
    assert desk.lease(1).reason == "the environment always raises"
    with pytest.raises(RefusedError, match="always raises"):
        desk.start()


def test_without_staleness_a_rollback_takes_back_what_is_being_generated(make: Any) -> None:
    desk = make(max_staleness=0)
    desk.start()
    run_steps(desk, 1, 2)
    held = desk.lease(2).leases
    assert [lease.min_version for lease in held] == [Version(1, 2)] * 2
    epoch = desk.start(1)
    assert desk.submit(held[0]).status == 409
    assert desk.lease(2).leases == [], "step 2 has to be replayed first"
    desk.batch(2, epoch)
    desk.commit(2, epoch)
    again = desk.lease(2).leases
    assert [(lease.group_id, lease.fence, lease.min_version) for lease in again] == [
        (lease.group_id, 2, Version(2, 2)) for lease in held
    ]


def test_with_staleness_any_version_may_serve(make: Any) -> None:
    assert make(max_staleness=1).lease(1).leases[0].min_version == Version(0, 0)


def test_payloads_go_when_every_group_in_them_is_safely_trained(make: Any) -> None:
    desk = make(segment_bytes=1, steps=20)
    desk.start()
    run_steps(desk, 1, 4)
    assert desk.checkpoint(2, 1) == [1, 2]
    assert desk.checkpoint(4, 3) == [3, 4, 5, 6]
    with pytest.raises(RefusedError, match="are gone") as refusal:
        desk.batch(3)
    assert refusal.value.status == 410
    assert desk.batch(4).groups == [6, 7]
    with pytest.raises(RefusedError, match="replay from steps 3 to 4 only"):
        desk.start(2)
    assert desk.start(3) == 2


def test_steps_that_changed_no_weights_are_counted(make: Any) -> None:
    desk = make()
    desk.start()
    for step, skipped in ((1, 0.0), (2, 1.0), (3, 1.0)):
        for lease in desk.lease(2).leases:
            desk.submit(lease, step=step - 1)
        desk.batch(step)
        with desk.ledger.transaction():
            desk.ledger.steps.commit(step, 1, {"skipped": skipped})
            desk.ledger.steps.commit(step, 1, {"skipped": skipped})
    assert desk.ledger.run.now.count("steps_skipped") == 2


def test_the_oldest_checkpoint_never_moves_back(make: Any) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 3)
    desk.checkpoint(3, 3)
    desk.checkpoint(3, 1)
    with pytest.raises(RefusedError, match="replay from steps 3 to 3 only"):
        desk.start(1)
    with pytest.raises(RefusedError, match="is above it"):
        desk.checkpoint(3, 4)


def test_a_checkpoint_that_outlived_its_ledger_is_gone_on_from(make: Any) -> None:
    desk = make()
    assert desk.start(5) == 1
    run_steps(desk, 6, 6)
    with pytest.raises(RefusedError, match="cannot start at step 11"):
        desk.start(11)
    with pytest.raises(RefusedError, match="replay from steps 5 to 6 only"):
        desk.start(7)


def test_everything_is_there_after_reopening(make: Any, tmp_path: Path) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 2)
    held, done = desk.lease(2).leases
    desk.submit(done)
    before = desk.ledger.snapshot()
    desk.close()
    again = make(announced=False)
    assert again.ledger.snapshot() == before
    assert again.ledger.rollouts.held() == [(held.group_id, held.fence, "actor-0")]
    assert again.batch(2).groups == [2, 3]
    assert again.submit(held).status == 201
    assert again.batch(3).groups == [held.group_id, done.group_id]


def test_a_failed_operation_takes_back_its_share_only(make: Any) -> None:
    desk = make()
    with desk.ledger.transaction():
        with desk.ledger.savepoint():
            desk.ledger.rollouts.lease("actor", "one", 1, 64, None)
        with pytest.raises(RuntimeError, match="after it had written"), desk.ledger.savepoint():
            desk.ledger.rollouts.lease("actor", "two", 1, 64, None)
            raise RuntimeError("after it had written")
    assert desk.states["leased"] == 1
    desk.ledger.audit()


def test_a_transaction_that_cannot_be_written_leaves_nothing(make: Any) -> None:
    desk = make()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    desk.payloads.sync, sync = fail, desk.payloads.sync
    lease = None
    with pytest.raises(OSError, match="No space"):
        lease = desk.lease(1)
    assert lease is None
    desk.payloads.sync = sync
    assert desk.states["submitted"] == 0
    assert desk.lease(1).leases[0].group_id == 0
    desk.ledger.audit()


def test_another_jobs_ledger_and_damaged_files_are_refused(make: Any, tmp_path: Path) -> None:
    desk = make()
    lease = desk.lease(1).leases[0]
    desk.submit(lease)
    desk.close()
    with pytest.raises(LedgerDamagedError, match="use a fresh run directory"):
        make(job="another")
    with pytest.raises(LedgerDamagedError, match="use a fresh run directory"):
        make(groups_per_step=3)
    database = tmp_path / "coordinator" / "ledger.sqlite"
    with sqlite3.connect(database) as sql:
        sql.execute("UPDATE counters SET value = 7 WHERE name = 'completed'")
    sql.close()
    with pytest.raises(LedgerDamagedError, match="the counters say"):
        make(announced=False)
    with sqlite3.connect(database) as sql:
        sql.execute("UPDATE counters SET value = 1 WHERE name = 'completed'")
    sql.close()
    (tmp_path / "coordinator" / "payloads" / "00000001.seg").unlink()
    with pytest.raises(PayloadError, match="is missing"):
        make(announced=False)
    database.write_bytes(b"this is no database, whatever its name says " * 100)
    with pytest.raises(LedgerDamagedError, match="not a usable ledger"):
        make(announced=False)


def test_group_ids_and_problems_depend_on_the_seed_and_the_order_alone(make: Any, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[tuple[int, int]]:
        desk = make(seed=seed, max_staleness=9)
        found = [(lease.group_id, lease.problem_index) for lease in desk.lease(20).leases]
        desk.close()
        shutil.rmtree(tmp_path / "coordinator")
        return found

    assert drawn(1) == drawn(1)
    assert [group for group, _ in drawn(1)] == list(range(20))
    assert drawn(1) != drawn(2)


def test_people_are_shown_the_newest_trained_groups_first(make: Any) -> None:
    desk = make()
    desk.start()
    run_steps(desk, 1, 2)
    done = desk.lease(1).leases[0]
    desk.submit(done)
    shown = desk.ledger.steps.shown(None, 3)
    assert [(group.state, group.step) for group in shown] == [("trained", 2), ("trained", 2), ("trained", 1)]
    assert [group.state for group in desk.ledger.steps.shown(None, 10)] == ["trained"] * 4 + ["completed"]
    assert [group.step for group in desk.ledger.steps.shown(1, 10)] == [1, 1]
