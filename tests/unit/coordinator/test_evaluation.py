from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.config.roles import Evaluation
from inflight_runtime.coordinator.evaluation import EVALUATION_BASE
from inflight_runtime.types import Version
from support.coordinators import Desk, coordinator_config


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    config = coordinator_config(tmp_path, evaluation=Evaluation(every_steps=2, prompts=3, attempts=2), max_staleness=1)
    desk = Desk.open(config)
    desk.announce(100, 50)
    yield desk
    desk.close()


def run_step(desk: Desk, step: int, epoch: int = 1) -> None:
    for lease in desk.lease(2).leases:
        desk.submit(lease)
    desk.batch(step, epoch)
    desk.commit(step, epoch)


def result(desk: Desk) -> dict[str, Any]:
    return desk.ledger.run.now.record("evaluation")


def test_it_runs_before_the_first_step_with_priority_and_outside_of_the_accounting(desk: Desk) -> None:
    desk.start()
    leases = desk.lease(4, served=Version(1, 0)).leases
    assert [(lease.kind, lease.problem_index, lease.attempts) for lease in leases[:3]] == [
        ("eval", 0, 2),
        ("eval", 1, 2),
        ("eval", 2, 2),
    ]
    assert leases[0].group_id >= EVALUATION_BASE
    assert leases[0].min_version == Version(1, 0)
    assert [lease.kind for lease in leases[3:]] == ["train"]
    assert leases[3].group_id == 0, "training's group ids do not depend on evaluation"
    assert desk.states["submitted"] == 1
    for lease, rewards in zip(leases[:3], ([1.0, 0.0], [1.0, 1.0], [None, None]), strict=True):
        assert result(desk) == {}
        receipt = desk.submit(lease, rewards=rewards)
        assert (receipt.status, receipt.state) == (201, "evaluated")
    assert result(desk) == {"step": 0.0, "attempts": 4.0, "attempts_failed": 2.0, "reward_mean": 0.75, "exact": 0.75}
    assert desk.states == {"submitted": 1, "leased": 1, "completed": 0, "assigned": 0, "trained": 0, "dropped": 0}
    assert desk.submit(leases[0]).status == 200
    assert desk.ledger.run.now.count("attempts_failed") == 0


def test_it_waits_for_a_server_with_the_weights_it_is_about(desk: Desk) -> None:
    desk.start()
    for lease in desk.lease(3, served=Version(1, 0)).leases:
        desk.submit(lease)
    run_step(desk, 1)
    run_step(desk, 2)
    for served in (None, Version(1, 1)):
        assert all(lease.kind == "train" for lease in desk.lease(1, served=served).leases)
    assert {lease.kind for lease in desk.lease(3, served=Version(1, 2)).leases} == {"eval"}


def test_one_that_falls_due_while_another_is_under_way_is_left_out(desk: Desk) -> None:
    desk.start()
    first = desk.lease(3, served=Version(1, 0)).leases
    run_step(desk, 1)
    run_step(desk, 2)
    for lease in first:
        desk.submit(lease)
    assert result(desk)["step"] == 0
    assert all(lease.kind == "train" for lease in desk.lease(2, served=Version(1, 2)).leases)


def test_leases_expire_and_are_fenced_like_any_other(desk: Desk) -> None:
    desk.start()
    lease = desk.lease(1, served=Version(1, 0)).leases[0]
    desk.requeue(lease)
    assert desk.submit(lease).status == 409
    again = desk.lease(1, served=Version(1, 0), request="again").leases[0]
    assert (again.group_id, again.fence) == (lease.group_id, 2)
    assert desk.lease(1, served=Version(1, 0), request="again").leases[0] == again
    assert (again.group_id, again.fence, "actor-0") in desk.ledger.rollouts.held()
    assert desk.submit(again).status == 201
    assert desk.submit(again).status == 200


def test_a_problem_that_is_given_up_is_left_out(desk: Desk) -> None:
    desk.start()
    first, second, third = desk.lease(3, served=Version(1, 0)).leases
    desk.submit(first, rewards=[1.0, 1.0])
    assert desk.drop(second, "prompt_too_long").status == 201
    desk.submit(third, rewards=[0.0, 1.0])
    assert result(desk)["reward_mean"] == 0.75
    assert result(desk)["attempts_failed"] == 2


def test_a_trainer_restart_gives_up_what_is_under_way_and_begins_anew(desk: Desk) -> None:
    desk.start()
    lease = desk.lease(1, served=Version(1, 0)).leases[0]
    epoch = desk.start(0)
    assert desk.ledger.rollouts.held() == []
    assert desk.submit(lease).status == 200
    again = desk.lease(3, served=Version(epoch, 0)).leases
    assert [group.min_version for group in again] == [Version(2, 0)] * 3
    for group in again:
        desk.submit(group)
    assert result(desk)["step"] == 0
    desk.start(0)
    assert all(group.kind == "train" for group in desk.lease(3, served=Version(3, 0)).leases)


@pytest.mark.parametrize(("available", "expected"), [(None, 3), (50, 3), (2, 2), (0, 0)])
def test_no_more_prompts_than_the_environment_holds_out(tmp_path: Path, available: int | None, expected: int) -> None:
    config = coordinator_config(tmp_path, evaluation=Evaluation(every_steps=2, prompts=3))
    desk = Desk.open(config)
    desk.announce(100, available)
    desk.start()
    leases = desk.lease(3, served=Version(1, 0)).leases
    assert sum(lease.kind == "eval" for lease in leases) == expected
    desk.close()
