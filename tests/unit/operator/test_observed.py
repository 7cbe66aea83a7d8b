"""What the children's own status says."""

from __future__ import annotations

from typing import Any

import pytest

from inflight_operator import names
from inflight_operator.builders import role_of
from inflight_operator.observed import counts_of, grace_of, restarts_of, settled_of, trainer_of
from inflight_runtime.api import RLTrainingJob, validate_job
from inflight_runtime.api.status import JobStatus, RoleStatus

ENDED = "2026-05-01T12:00:00Z"
RUNNING = JobStatus(phase="Running", starts=2)


def child(kind: str, role: str, spec: dict[str, Any], status: dict[str, Any] | None = None, **meta: Any) -> Any:
    annotations = {names.START_ANNOTATION: meta.pop("start", "2")}
    metadata = {"name": f"j-{role}", "labels": names.labels("j", role), "annotations": annotations, "uid": kind, **meta}
    return {"kind": kind, "metadata": metadata, "spec": spec, "status": status or {}}


def job_set(suspend: bool = False, *conditions: str, restarts: int = 0, **meta: Any) -> Any:
    spec = {
        "suspend": suspend,
        "replicatedJobs": [
            {"template": {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 150, "containers": []}}}}}
        ],
    }
    listed = [{"type": kind, "status": "True", "lastTransitionTime": ENDED, "message": kind} for kind in conditions]
    return child("JobSet", names.TRAINER, spec, {"conditions": listed, "restarts": restarts}, **meta)


def batch_job(ready: int = 1, *, owner: str = "JobSet", suspend: bool = False, active: int = 1, **meta: Any) -> Any:
    status = {"ready": ready, "active": active}
    return child(
        "Job", names.TRAINER, {"suspend": suspend}, status, ownerReferences=[{"kind": "JobSet", "uid": owner}], **meta
    )


@pytest.fixture
def job() -> RLTrainingJob:
    return validate_job(
        {
            "apiVersion": "inflight.dev/v1alpha1",
            "kind": "RLTrainingJob",
            "metadata": {"name": "j"},
            "spec": {
                "model": {"source": "/m"},
                "environment": {"entrypoint": "m:E"},
                "algorithm": {"steps": 1},
            },
        },
        "",
    )


def test_without_a_jobset_there_is_no_trainer() -> None:
    assert not trainer_of([child("Deployment", "actor", {})], RUNNING).exists


@pytest.mark.parametrize(("condition", "succeeded"), [("Completed", True), ("Failed", False)])
def test_a_jobset_that_has_ended_says_how(condition: str, succeeded: bool) -> None:
    found = trainer_of([job_set(False, "StartupPolicyCompleted", condition)], RUNNING)
    assert (found.succeeded, found.message) == (succeeded, condition)
    assert found.ended is not None and found.ended.isoformat() == "2026-05-01T12:00:00+00:00"


@pytest.mark.parametrize("phase", ["Suspending", "Suspended"])
def test_a_trainer_that_fails_of_being_stopped_has_not_failed_the_run(phase: str) -> None:
    stopping = RUNNING.model_copy(update={"phase": phase})
    assert trainer_of([job_set(True, "Failed")], stopping).ended is None
    # It had not been told to stop yet:
    assert trainer_of([job_set(False, "Failed")], stopping).ended is not None
    # It ended well all the same:
    assert trainer_of([job_set(True, "Completed")], stopping).succeeded


def test_a_failure_of_an_earlier_start_is_not_this_ones() -> None:
    assert trainer_of([job_set(True, "Failed", start="1")], RUNNING).ended is None
    assert trainer_of([job_set(True, "Completed", start="1")], RUNNING).ended is not None


def test_suspended_counts_only_of_this_start() -> None:
    assert trainer_of([job_set(True)], RUNNING).suspended
    assert not trainer_of([job_set(True, start="1")], RUNNING).suspended


def test_counts_are_of_pods(job: RLTrainingJob) -> None:
    children = [
        child("StatefulSet", "inference", {"replicas": 3}, {"readyReplicas": 2}),
        child("Deployment", "actor", {}, {"readyReplicas": 5}),
        child("StatefulSet", "coordinator", {"replicas": 0}),
        child("Service", "inference", {}),
        job_set(),
    ]
    jobs = [batch_job(1), batch_job(1, owner="another"), batch_job(1, deletionTimestamp=ENDED)]
    assert counts_of(children, jobs, job) == {
        "inference": RoleStatus(desired=3, ready=2),
        "actor": RoleStatus(desired=1, ready=1),
        "coordinator": RoleStatus(desired=0, ready=0),
        "trainer": RoleStatus(desired=1, ready=1),
    }


@pytest.mark.parametrize("stopped", [job_set(True), job_set(False, "Completed"), job_set(False, "Failed")])
def test_a_trainer_that_should_not_run_has_no_nodes(job: RLTrainingJob, stopped: Any) -> None:
    assert counts_of([stopped], [batch_job(2)], job) == {"trainer": RoleStatus(desired=0, ready=0)}


def test_a_model_is_counted_while_it_is_fetched(job: RLTrainingJob) -> None:
    fetching = child("Job", "model", {}, {"ready": 1})
    assert counts_of([fetching], [], job) == {"model": RoleStatus(desired=1, ready=1)}
    fetched = child("Job", "model", {}, {"conditions": [{"type": "Complete", "status": "True"}]})
    assert counts_of([fetched], [], job) == {}


def test_restarts_are_the_jobsets_and_outlive_it() -> None:
    assert restarts_of([job_set(restarts=3)], JobStatus(restarts=1)) == 3
    assert restarts_of([], JobStatus(restarts=1)) == 1


def test_grace_periods_are_those_of_the_pods() -> None:
    template = {"template": {"spec": {"terminationGracePeriodSeconds": 5}}}
    children = [
        child("Deployment", "actor", template),
        child("StatefulSet", "inference", {"template": {"spec": {}}}),
        child("Service", "inference", {}),
        job_set(),
    ]
    assert grace_of(children) == {"actor": 5, "inference": 30, "trainer": 150}


def test_an_object_without_labels_has_no_role() -> None:
    assert role_of({"metadata": {}}) == role_of({"metadata": {"labels": None}}) == ""


@pytest.mark.parametrize(
    ("children", "jobs", "settled"),
    [
        ([], [], True),
        ([child("Deployment", "trainer", {"replicas": 0}, {"observedGeneration": 3}, generation=3)], [], True),
        ([child("Deployment", "trainer", {"replicas": 0}, {"observedGeneration": 2}, generation=3)], [], False),
        ([child("Deployment", "trainer", {"replicas": 0}, {"replicas": 1}, generation=0)], [], False),
        ([child("Deployment", "trainer", {"replicas": 1}, {"observedGeneration": 3}, generation=3)], [], False),
        ([job_set()], [], False),
        ([job_set(True)], [], True),
        ([job_set(True)], [batch_job()], False),
        ([job_set(True)], [batch_job(suspend=True, active=1)], False),
        ([job_set(True)], [batch_job(suspend=True, active=0)], True),
        ([job_set(True)], [batch_job(owner="another")], True),
        ([job_set(False, "Failed")], [], True),
        ([child("Service", "trainer", {})], [], True),
    ],
)
def test_a_role_is_settled_when_its_controllers_have_seen_that_it_is_stopped(
    children: list[Any], jobs: list[Any], settled: bool
) -> None:
    assert (names.TRAINER in settled_of(children, jobs)) == settled
