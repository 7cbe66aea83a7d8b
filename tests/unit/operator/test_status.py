"""The status that a job gets from what was found of it."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator import names
from inflight_operator.lifecycle import Cause, Plan, Trainer, format_time
from inflight_operator.progress import Reading
from inflight_operator.refusals import Refusal
from inflight_operator.status import Found, begun, condition, left, merge_patch, new_status, troubled, wire
from inflight_runtime.api.status import JobStatus, Progress, RoleStatus

NOW = datetime.datetime(2026, 5, 1, 12, 0, tzinfo=datetime.UTC)
LATER = NOW + datetime.timedelta(minutes=1)
FROZEN = {"images": {"actor": "a:1"}, "builder_revision": "7", "servers_at_start": 2, "actors_at_start": 3}
ONE = RoleStatus(desired=1, ready=1)
ALL_READY = {"coordinator": ONE, "trainer": ONE, "inference": RoleStatus(desired=2, ready=2), "actor": ONE}
TRAINS = Trainer(exists=True)
STARTED = begun(JobStatus(), NOW, FROZEN)
RUN = Plan("Pending", run=True)


def told(found: Found, old: JobStatus = STARTED) -> JobStatus:
    return new_status("j", old, found, NOW)


def states(status: JobStatus) -> dict[str, str]:
    return {one.type: one.status for one in status.conditions}


def kstatus(status: JobStatus) -> tuple[str, ...]:
    """What a GitOps tool looks at: Ready, then those of the others that are there."""
    found = states(status)
    return (found["Ready"], *(kind for kind in ("Reconciling", "Stalled") if kind in found))


QUOTA = Refusal(Cause("QuotaExceeded", "no"))
HOPELESS = Refusal(Cause("InvalidPodTemplate", "no"), stalled=True)


@pytest.mark.parametrize(
    ("found", "old", "phase", "expected"),
    [
        (Found(RUN, 1, ALL_READY, TRAINS), STARTED, "Running", ("True",)),
        (Found(RUN, 1, {}, TRAINS), STARTED, "Starting", ("False", "Reconciling")),
        (Found(RUN, 1, {}, TRAINS, problem=QUOTA), STARTED, "Pending", ("False", "Reconciling")),
        (Found(RUN, 1, {}, TRAINS, problem=HOPELESS), STARTED, "Pending", ("False", "Stalled")),
        (Found(RUN, 1, {}, waits_for_model=True), STARTED, "Pending", ("False", "Reconciling")),
        (Found(Plan("Pending"), 1, invalid=Cause("InvalidSpec", "")), JobStatus(), "Pending", ("False", "Stalled")),
        (Found(Plan("Suspending"), 1), STARTED, "Suspending", ("False", "Reconciling")),
        (Found(Plan("Suspended"), 1), STARTED, "Suspended", ("True",)),
        (Found(Plan("Suspended"), 1), JobStatus(), "Suspended", ("True",)),
        (Found(Plan("Completing"), 1), STARTED, "Completing", ("False", "Reconciling")),
        (Found(Plan("Succeeded"), 1), STARTED, "Succeeded", ("True",)),
        (Found(Plan("Failed", failure=Cause("TrainerFailed", "")), 1), STARTED, "Failed", ("False", "Stalled")),
    ],
)
def test_phases_and_what_gitops_tools_see_of_them(
    found: Found, old: JobStatus, phase: str, expected: tuple[str, ...]
) -> None:
    status = told(found, old)
    assert status.phase == phase
    assert kstatus(status) == expected
    assert status.observed_generation == 1


@pytest.mark.parametrize(
    ("role", "ready", "phase"),
    [
        ("coordinator", 0, "Starting"),
        ("trainer", 0, "Starting"),
        ("inference", 0, "Starting"),
        ("inference", 1, "Running"),
        ("actor", 0, "Starting"),
    ],
)
def test_running_means_that_every_role_does_its_work(role: str, ready: int, phase: str) -> None:
    counts = ALL_READY | {role: ALL_READY[role].model_copy(update={"ready": ready})}
    assert told(Found(RUN, 1, counts, TRAINS)).phase == phase


def test_roles_without_replicas_keep_nobody_from_running() -> None:
    status = told(Found(RUN, 1, ALL_READY | {"actor": RoleStatus(), "inference": RoleStatus()}, TRAINS))
    assert (status.phase, kstatus(status)) == ("Running", ("True",))
    assert states(status)["ActorsReady"] == "False"


def test_a_running_job_stays_running_through_trouble_and_says_that_it_is_not_ready() -> None:
    running = told(Found(RUN, 1, ALL_READY, TRAINS))
    counts = ALL_READY | {"inference": RoleStatus(desired=2, ready=0)}
    status = told(Found(RUN, 1, counts, TRAINS, causes={"inference": Cause("Crashing", "boom")}), running)
    assert (status.phase, kstatus(status)) == ("Running", ("False", "Reconciling"))
    ready, role = condition(status, "Ready"), condition(status, "InferenceReady")
    assert ready is not None and role is not None
    assert (ready.reason, ready.message) == ("Crashing", "boom")
    assert role.message == "0 of 2 ready; boom"


@pytest.mark.parametrize(("phase", "shown"), [("", "Pending"), ("Running", "Running"), ("Suspended", "Suspended")])
def test_a_job_that_the_operator_cannot_work_on_has_a_phase_all_the_same(phase: str, shown: str) -> None:
    old = JobStatus() if not phase else JobStatus.model_validate({"phase": phase})
    status = troubled(old, Cause("Forbidden", "no"), 1, NOW)
    assert status.phase == shown
    assert kstatus(status) == ("False", "Reconciling")


def test_a_jobset_that_somebody_else_suspended_is_shown() -> None:
    running = told(Found(RUN, 1, ALL_READY, TRAINS))
    counts = ALL_READY | {"trainer": RoleStatus()}
    status = told(Found(RUN, 1, counts, Trainer(True, suspended=True)), running)
    assert status.phase == "Running"
    for kind in ("Ready", "TrainerRunning"):
        found = condition(status, kind)
        assert found is not None and (found.status, found.reason) == ("False", "SuspendedElsewhere")


def test_a_failure_keeps_its_first_reason() -> None:
    plan = Plan("Failed", leave=True, failure=Cause("TrainerFailed", "in short"))
    first = told(Found(plan, 1, failure=Cause("TrainerFailed", "exit code 3: boom")))
    again = told(Found(Plan("Failed"), 2), first)
    for status in (first, again):
        found = condition(status, "Failed")
        assert found is not None and (found.reason, found.message) == ("TrainerFailed", "exit code 3: boom")
    assert again.completion_time == first.completion_time


def test_the_end_is_when_the_trainer_ended() -> None:
    status = new_status("j", STARTED, Found(Plan("Succeeded"), 1, trainer=Trainer(True, ended=NOW)), LATER)
    assert status.completion_time == format_time(NOW)
    assert status.endpoints.inference == ""


def test_a_condition_keeps_its_time_while_it_stays_the_same() -> None:
    first = told(Found(RUN, 1, {}, TRAINS))
    later = new_status("j", first, Found(RUN, 2, ALL_READY, TRAINS), LATER)
    times = {one.type: one.last_transition_time for one in later.conditions}
    assert times["Validated"] == format_time(NOW)
    assert times["Ready"] == format_time(LATER)
    assert {one.observed_generation for one in later.conditions} == {2}


def test_progress_that_says_the_same_is_the_same() -> None:
    old = STARTED.model_copy(update={"progress": Progress(step=3, updated_time=format_time(NOW))})
    same = Reading(Progress(step=3, updated_time=format_time(LATER)))
    assert told(Found(RUN, 1, reading=same), old).progress == old.progress
    assert told(Found(RUN, 1, reading=None), old).progress == old.progress
    newer = Progress(step=4, updated_time=format_time(LATER))
    assert told(Found(RUN, 1, reading=Reading(newer)), old).progress == newer


def test_an_operator_that_has_just_started_says_of_a_coordinator_what_was_said_before() -> None:
    for reading in (Reading(None, error="no answer"), Reading(Progress(step=3))):
        before = told(Found(RUN, 1, ALL_READY, TRAINS, reading=reading))
        after = new_status("j", before, Found(RUN, 1, ALL_READY, TRAINS), LATER)
        assert merge_patch(wire(before), wire(after)) == {}
        not_there = {**ALL_READY, "coordinator": RoleStatus(desired=1)}
        gone = new_status("j", before, Found(RUN, 1, not_there, TRAINS), LATER)
        assert condition(gone, "CoordinatorReachable") is None


def test_a_start_freezes_what_it_is_rendered_from() -> None:
    again = begun(left(STARTED, Plan("Suspending"), LATER, {}), LATER, FROZEN | {"images": {"actor": "a:2"}})
    assert (STARTED.starts, again.starts) == (1, 2)
    assert again.start_time == STARTED.start_time == format_time(NOW)
    assert (again.active_since, again.active_seconds) == (format_time(LATER), 60)
    assert (again.images, again.suspending_since) == ({"actor": "a:2"}, "")
    assert (again.inference.replicas_at_start, again.actors.replicas_at_start) == (2, 3)


def test_counts_to_come_back_to_are_kept_when_there_are_none_to_see() -> None:
    first = left(STARTED, Plan("Suspending"), NOW, {names.INFERENCE: 4, names.ACTOR: 5})
    again = left(first, Plan("Suspending"), NOW, {names.INFERENCE: None, names.ACTOR: None})
    assert (again.inference.replicas_before_suspend, again.actors.replicas_before_suspend) == (4, 5)


def test_the_selector_is_there_from_the_first_status_on() -> None:
    status = told(Found(Plan("Suspended"), 1), JobStatus())
    assert status.inference.selector == "inflight.dev/job=j,inflight.dev/role=inference"


FOUND = st.builds(
    Found,
    plan=st.sampled_from(
        [
            RUN,
            Plan("Suspending", waits_for="w"),
            Plan("Suspended"),
            Plan("Completing"),
            Plan("Succeeded"),
            Plan("Failed"),
        ]
    ),
    generation=st.integers(0, 5),
    counts=st.dictionaries(
        st.sampled_from(names.ROLES), st.builds(RoleStatus, desired=st.integers(0, 3), ready=st.integers(0, 3))
    ),
    trainer=st.builds(Trainer, exists=st.booleans(), suspended=st.booleans(), ended=st.none() | st.just(NOW)),
    problem=st.none() | st.just(QUOTA) | st.just(HOPELESS),
    invalid=st.none() | st.just(Cause("InvalidSpec", "m")),
    causes=st.dictionaries(st.sampled_from(names.ROLES), st.just(Cause("Crashing", "boom"))),
    waits_for_model=st.booleans(),
    restarts=st.integers(0, 3),
    gpus=st.integers(0, 9),
    reading=st.none()
    | st.builds(Reading, st.none() | st.builds(Progress, step=st.integers(0, 9)), error=st.sampled_from(["", "gone"])),
)


@given(FOUND, FOUND)
def test_a_status_written_twice_is_the_same(first: Found, second: Found) -> None:
    status = told(second, told(first))
    again = new_status("j", status, second, LATER)
    assert merge_patch(wire(status), wire(again)) == {}


@given(FOUND, FOUND)
def test_a_patch_of_a_status_makes_the_new_one(first: Found, second: Found) -> None:
    old = told(first)
    new = told(second, old)
    assert applied(wire(old), merge_patch(wire(old), wire(new))) == wire(new)
    # What is not on the wire is what the API fills in or leaves out.
    assert JobStatus.model_validate(wire(new), by_alias=True, by_name=False) == new


@given(FOUND)
def test_exactly_one_of_ready_reconciling_and_stalled_holds(found: Found) -> None:
    status = told(found)
    true = [kind for kind in ("Ready", "Reconciling", "Stalled") if states(status).get(kind) == "True"]
    assert len(true) == 1
    assert len({one.type for one in status.conditions}) == len(status.conditions)
    assert all(one.status == "True" for one in status.conditions if one.type in ("Reconciling", "Stalled"))


JSON = st.recursive(
    st.integers(0, 3) | st.text(max_size=2) | st.booleans() | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), JSON, max_size=4)


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_makes_the_new_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert applied(old, merge_patch(old, new)) == new
    assert merge_patch(new, new) == {}


def applied(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = applied(result.get(name), value)
    return result


def test_a_late_answer_does_not_replace_what_is_known_of_an_unreachable_coordinator() -> None:
    known = Found(RUN, 1, ALL_READY, TRAINS, reading=Reading(None, error="the name cannot be resolved"))
    before = told(known)
    late = Found(RUN, 1, ALL_READY, TRAINS, reading=Reading(None, error="no answer within 3 s"))
    assert merge_patch(wire(before), wire(new_status("j", before, late, LATER))) == {}
    assert merge_patch(wire(told(late)), wire(new_status("j", told(late), known, LATER))) != {}
