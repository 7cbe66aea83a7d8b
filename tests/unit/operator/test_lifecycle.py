"""Plans: what a job should do next, for every state it can be in."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator import names
from inflight_operator.lifecycle import (
    OVER,
    STOP_MARGIN_S,
    STOP_ORDER,
    Cause,
    Plan,
    Trainer,
    World,
    active_seconds,
    format_time,
    parse_time,
    plan,
    pods_matter,
)
from inflight_operator.status import Found, begun, left, new_status
from inflight_runtime.api.status import Condition, JobStatus

NOW = datetime.datetime(2026, 5, 1, 12, 0, tzinfo=datetime.UTC)
EVERYTHING = frozenset({*STOP_ORDER, names.MODEL})
SERVING = frozenset({names.ACTOR, names.INFERENCE, names.COORDINATOR})
FROZEN = {"images": {}, "builder_revision": "1", "servers_at_start": 1, "actors_at_start": 1}
RUNNING = JobStatus(phase="Running", starts=1, active_since=format_time(NOW - datetime.timedelta(minutes=1)))
SUSPENDING = JobStatus(phase="Suspending", starts=1, suspending_since=format_time(NOW))
DONE = Trainer(True, ended=NOW, succeeded=True)
BROKEN = Trainer(True, ended=NOW, message="out of restarts")


def at(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def failed(reason: str) -> JobStatus:
    condition = Condition(type="Failed", status="True", reason=reason)
    return JobStatus(phase="Failed", starts=1, completion_time=format_time(NOW), conditions=[condition])


@pytest.mark.parametrize(
    ("status", "begin"),
    [
        (JobStatus(), True),
        (JobStatus(phase="Pending"), True),
        (JobStatus(phase="Pending", starts=1, active_since=format_time(NOW)), False),
        (JobStatus(phase="Starting", starts=1, active_since=format_time(NOW)), False),
        (RUNNING, False),
        (SUSPENDING, True),
        (JobStatus(phase="Suspended"), True),
        (JobStatus(phase="Suspended", starts=3), True),
    ],
)
def test_a_job_that_is_not_active_begins_anew(status: JobStatus, begin: bool) -> None:
    planned = plan(World(NOW, suspend=False, status=status))
    assert (planned.run, planned.begin) == (True, begin)


def test_a_job_created_suspended_has_nothing_to_stop() -> None:
    assert plan(World(NOW, suspend=True, status=JobStatus())) == Plan("Suspended")
    assert not pods_matter(JobStatus(), True, Trainer())


def test_a_suspend_stops_the_actors_first_and_writes_down_when_it_began() -> None:
    planned = plan(World(NOW, suspend=True, status=RUNNING))
    assert (planned.phase, planned.leave) == ("Suspending", True)
    assert planned.stopped == {names.ACTOR, names.MODEL}


@pytest.mark.parametrize(
    ("left_over", "stopped"),
    [
        ({"actor": 1, "trainer": 1, "inference": 2, "coordinator": 1}, ("actor",)),
        ({"trainer": 1, "inference": 2, "coordinator": 1}, ("actor", "trainer")),
        ({"inference": 2, "coordinator": 1}, ("actor", "trainer", "inference")),
        ({"coordinator": 1}, STOP_ORDER),
        ({"model": 1}, STOP_ORDER),
    ],
)
def test_each_role_is_stopped_when_those_before_it_are_gone(
    left_over: dict[str, int], stopped: tuple[str, ...]
) -> None:
    planned = plan(World(NOW, suspend=True, status=SUSPENDING, pods=left_over, settled=EVERYTHING))
    assert (planned.phase, planned.stopped) == ("Suspending", frozenset({names.MODEL, *stopped}))
    assert planned.again_s is not None
    assert next(iter(left_over)) in planned.waits_for


@pytest.mark.parametrize(
    ("after_s", "stopped"),
    [
        (15.9, ("actor",)),
        (16, ("actor", "trainer")),
        (16 + 134.9, ("actor", "trainer")),
        (16 + 135, ("actor", "trainer", "inference")),
        (16 + 135 + 45, STOP_ORDER),
        (100_000, STOP_ORDER),
    ],
)
def test_a_role_that_does_not_go_holds_the_next_ones_up_only_until_its_deadline(
    after_s: float, stopped: tuple[str, ...]
) -> None:
    grace = {names.ACTOR: 1.0, names.TRAINER: 120.0, names.INFERENCE: 30.0}
    assert STOP_MARGIN_S == 15
    everybody = dict.fromkeys(STOP_ORDER, 1)
    world = World(at(after_s), suspend=True, status=SUSPENDING, pods=everybody, settled=EVERYTHING, grace_s=grace)
    planned = plan(world)
    # However late it is: suspended means that nothing is left.
    assert (planned.phase, planned.stopped) == ("Suspending", frozenset({names.MODEL, *stopped}))


def test_suspended_is_said_only_when_no_pod_is_left_and_none_can_come() -> None:
    world = World(NOW, suspend=True, status=SUSPENDING, pods={}, settled=EVERYTHING)
    assert plan(world) == Plan("Suspended", stopped=EVERYTHING)
    assert plan(replace(world, pods=None)).phase == "Suspending"
    unsettled = plan(replace(world, settled=EVERYTHING - {names.TRAINER}))
    assert (unsettled.phase, unsettled.stopped) == ("Suspending", frozenset({"actor", "trainer", "model"}))


def test_a_suspended_job_is_kept_stopped_without_another_look() -> None:
    status = JobStatus(phase="Suspended", starts=2)
    assert not pods_matter(status, True, Trainer(True, suspended=True))
    assert plan(World(NOW, suspend=True, status=status)) == Plan("Suspended", stopped=EVERYTHING)


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize("status", [RUNNING, SUSPENDING])
def test_the_end_of_the_trainer_is_the_end_of_the_run_even_while_suspending(status: JobStatus, suspend: bool) -> None:
    first = plan(World(NOW, suspend=suspend, status=status, trainer=DONE, pods={"actor": 1}))
    assert (first.phase, first.leave, first.removed) == ("Completing", True, SERVING)
    completing = status.model_copy(update={"phase": "Completing"})
    waiting = plan(World(at(5), suspend=suspend, status=completing, trainer=DONE, pods={"actor": 1, "inference": 2}))
    assert (waiting.phase, waiting.leave) == ("Completing", False)
    assert waiting.waits_for == "waiting for pods to end: 1 actor, 2 inference"
    gone = plan(World(at(6), suspend=suspend, status=completing, trainer=DONE, pods={"trainer": 1}))
    assert (gone.phase, gone.removed) == ("Succeeded", SERVING)


def test_the_end_of_a_run_does_not_wait_for_ever() -> None:
    status = RUNNING.model_copy(update={"phase": "Completing"})
    assert plan(World(at(121), suspend=False, status=status, trainer=DONE, pods={"actor": 1})).phase == "Succeeded"


def test_a_jobset_deleted_by_hand_while_completing_changes_nothing() -> None:
    status = RUNNING.model_copy(update={"phase": "Completing"})
    assert plan(World(NOW, suspend=False, status=status, pods={})).phase == "Succeeded"


@pytest.mark.parametrize(("on_failure", "removed"), [("keep", frozenset()), ("delete", SERVING)])
def test_a_failed_trainer_fails_the_job(on_failure: str, removed: frozenset[str]) -> None:
    world = World(NOW, suspend=False, status=RUNNING, trainer=BROKEN, pods={})
    world = replace(world, on_failure=on_failure)  # type: ignore[arg-type]
    planned = plan(world)
    assert (planned.phase, planned.leave, planned.removed) == ("Failed", True, removed)
    assert planned.failure == Cause("TrainerFailed", "out of restarts")
    assert plan(replace(world, status=failed("TrainerFailed"))).removed == removed


def test_a_jobset_of_a_job_that_has_not_started_says_nothing() -> None:
    assert plan(World(NOW, suspend=False, status=JobStatus(), trainer=BROKEN)).begin


def test_only_active_time_counts_against_the_deadline() -> None:
    status = RUNNING.model_copy(update={"active_seconds": 30})
    world = World(NOW, suspend=False, status=status, active_deadline_s=100)
    assert plan(world).again_s == 10
    over = plan(replace(world, now=at(10)))
    assert (over.phase, over.leave, over.removed) == ("Failed", True, EVERYTHING)
    assert over.failure is not None and over.failure.reason == "DeadlineExceeded"
    suspended = JobStatus(phase="Suspended", starts=1, active_seconds=90)
    assert plan(World(at(10_000), suspend=False, status=suspended, active_deadline_s=100)).again_s == 10


def test_past_the_deadline_everything_goes_whatever_is_kept_of_other_failures() -> None:
    planned = plan(World(at(60), suspend=False, status=failed("DeadlineExceeded"), on_failure="keep"))
    assert planned.removed == EVERYTHING


@pytest.mark.parametrize("status", [JobStatus(phase="Succeeded", completion_time=format_time(NOW)), failed("X")])
def test_the_ttl_cleans_up_once_it_has_passed(status: JobStatus) -> None:
    assert plan(World(at(9), suspend=False, status=status, ttl_s=60)).again_s == 51
    assert not plan(World(at(59), suspend=False, status=status, ttl_s=60)).clean
    assert plan(World(at(60), suspend=False, status=status, ttl_s=60)).clean
    assert plan(World(at(0), suspend=False, status=status, ttl_s=0)).clean
    assert not plan(World(at(1e6), suspend=False, status=status)).clean


@pytest.mark.parametrize("text", ["", "soon", "2026-05-01T12:00:00"])
def test_what_is_no_time_with_a_zone_is_no_time(text: str) -> None:
    assert parse_time(text) is None


TRAINERS = st.builds(
    Trainer,
    exists=st.booleans(),
    suspended=st.booleans(),
    ended=st.none() | st.just(NOW),
    succeeded=st.booleans(),
)
PODS = st.none() | st.dictionaries(st.sampled_from([*STOP_ORDER, names.MODEL]), st.integers(0, 3))
STEPS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.booleans(),
        TRAINERS,
        PODS,
        st.frozensets(st.sampled_from([*STOP_ORDER, names.MODEL])),
    ),
    max_size=30,
)


@given(STEPS, st.none() | st.integers(1, 900), st.none() | st.integers(0, 900), st.sampled_from(["keep", "delete"]))
def test_whatever_happens_the_rules_hold(steps, deadline, ttl, on_failure) -> None:  # type: ignore[no-untyped-def]
    """A whole life: each plan is carried out on the status as the reconciler does it."""
    status, now, spent = JobStatus(), NOW, 0.0
    for pause, suspend, trainer, pods, settled in steps:
        if status.active_since:
            spent += pause
        now += datetime.timedelta(seconds=pause)
        planned = plan(
            World(
                now=now,
                suspend=suspend,
                status=status,
                trainer=trainer,
                pods=pods,
                settled=settled,
                active_deadline_s=deadline,
                ttl_s=ttl,
                on_failure=on_failure,
            )
        )
        before = status
        if status.phase in OVER:
            assert planned.phase == status.phase, "what is over stays over"
            assert not (planned.run or planned.begin or planned.leave or planned.stopped)
        # What is run is not stopped, and what is claimed to be suspended is.
        assert not (planned.run and (planned.stopped or planned.removed or planned.clean))
        assert not planned.begin or planned.run
        if planned.phase == "Suspended" and status.phase == "Suspending":
            assert pods is not None and not any(pods.values())
        # Later roles are never stopped before earlier ones.
        stopped = [role in planned.stopped for role in STOP_ORDER]
        assert stopped == sorted(stopped, reverse=True)
        if planned.begin:
            status = begun(status, now, FROZEN)
        if planned.leave:
            status = left(status, planned, now, {})
        status = new_status("j", status, Found(planned, 1, trainer=trainer), now)
        assert active_seconds(status, now) == pytest.approx(spent, abs=1e-6), "suspended time does not count"
        assert bool(status.active_since) == (status.phase in ("Pending", "Starting", "Running"))
        assert status.starts - before.starts == planned.begin
        assert bool(status.completion_time) == (status.phase in OVER)
