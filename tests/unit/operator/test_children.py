"""What is to be done about one child, case by case."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from inflight_operator import names
from inflight_operator.builders import Child, build_children
from inflight_operator.children import Owner, Step, model_fetched, next_step, stamped, stop_step
from support.cluster_jobs import FACTS, SETTINGS, UID, make_job

OWNER = Owner("letters", UID, 1)
FOREIGN = "00000000-0000-0000-0000-000000000000"
BUILT = {
    (child.kind, child.name): child
    for child in build_children(
        make_job(model={"source": "example-org/model-1b"}, inference={"replicas": 2}, actors={"replicas": 3}),
        SETTINGS,
        FACTS,
    )
}
LEFT_OPEN = {(child.kind, child.name): child for child in build_children(make_job(), SETTINGS, FACTS)}
STATEFUL_SET, DEPLOYMENT = BUILT["StatefulSet", "letters-inference"], BUILT["Deployment", "letters-actor"]
JOB_SET, FETCH = BUILT["JobSet", "letters-t"], BUILT["Job", "letters-model"]
CLAIM, KEPT_CLAIM = (BUILT["PersistentVolumeClaim", f"letters-{name}"] for name in ("coordinator", "checkpoint"))
ORDINARY = [child for child in BUILT.values() if child.kind != "Secret"]


def live(child: Child, start: int = 1, **changes: Any) -> dict[str, Any]:
    """A child as the server has it; changes by path, with ``__`` for a dot."""
    found = copy.deepcopy(stamped(child.manifest, start))
    found["metadata"] |= {"uid": "child-uid", "resourceVersion": "7"}
    for path, value in changes.items():
        place = found
        *above, last = path.split("__")
        for part in above:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return found


def ended(kind: str, message: str = "") -> list[dict[str, str]]:
    return [{"type": kind, "status": "True", "message": message}]


def of(step: Step) -> tuple[str, Any]:
    """Verb, and what is written of the spec or why nothing is."""
    if step.refusal is not None:
        return step.verb, step.refusal.cause.reason
    return step.verb, None if step.body is None else step.body.get("spec")


@pytest.mark.parametrize("child", ORDINARY, ids=lambda child: f"{child.kind}-{child.name}")
def test_every_child_is_made_with_its_start_left_alone_and_written_again_at_the_next_start(child: Child) -> None:
    made = next_step(child, None, replace(OWNER, trainer_pods=0))
    assert made.verb == "create" and made.body is not None
    assert made.body["metadata"]["annotations"][names.START_ANNOTATION] == "1"
    assert next_step(child, live(child), OWNER).verb == "leave"
    again = next_step(child, live(child), replace(OWNER, start=2))
    patched = child.kind in ("JobSet", "Job", "PersistentVolumeClaim")
    assert again.verb == ("patch" if patched else "apply") and again.body is not None
    assert again.body["metadata"]["annotations"][names.START_ANNOTATION] == "2"
    if patched:
        assert again.body["metadata"]["uid"] == "child-uid"


@pytest.mark.parametrize("trainer_pods", [None, 1])
def test_a_trainer_is_not_made_beside_pods_of_an_earlier_one(trainer_pods: int | None) -> None:
    assert of(next_step(JOB_SET, None, replace(OWNER, trainer_pods=trainer_pods))) == ("wait", "WaitingForDeletion")


@pytest.mark.parametrize("child", ORDINARY, ids=lambda child: f"{child.kind}-{child.name}")
def test_no_child_is_touched_that_is_going_or_is_not_ours(child: Child) -> None:
    going = live(child, metadata__deletionTimestamp="2026-01-01T00:00:00Z")
    assert of(next_step(child, going, OWNER)) == ("wait", "WaitingForDeletion")
    another = [{"kind": "RLTrainingJob", "name": "letters", "uid": FOREIGN}]
    of_another = live(child, metadata__ownerReferences=another)
    assert of(next_step(child, of_another, OWNER)) == ("wait", "WaitingForDeletion")
    foreign = live(child, metadata__ownerReferences=[{"kind": "Other", "uid": FOREIGN}], metadata__labels={})
    assert of(next_step(child, foreign, OWNER)) == ("refuse", "NameTaken")


@pytest.mark.parametrize(
    ("child", "changes", "expected"),
    [
        (STATEFUL_SET, {"spec__replicas": 5}, ("patch", {"replicas": 2})),
        (STATEFUL_SET, {"spec__serviceName": "other"}, ("apply", STATEFUL_SET.manifest["spec"])),
        (STATEFUL_SET, {"metadata__labels": {}}, ("apply", STATEFUL_SET.manifest["spec"])),
        (STATEFUL_SET, {"spec__revisionHistoryLimit": 3, "metadata__annotations__theirs": "x"}, ("leave", None)),
        (DEPLOYMENT, {"spec__replicas": 0}, ("patch", {"replicas": 3})),
        (LEFT_OPEN["Deployment", "letters-actor"], {"spec__replicas": 7}, ("leave", None)),
        (LEFT_OPEN["StatefulSet", "letters-inference"], {"spec__replicas": 7}, ("leave", None)),
    ],
)
def test_what_was_changed_by_hand_is_put_right_and_what_is_others_is_left(
    child: Child, changes: dict[str, Any], expected: tuple[str, Any]
) -> None:
    assert of(next_step(child, live(child, **changes), OWNER)) == expected


def test_a_repair_leaves_a_number_that_an_autoscaler_owns() -> None:
    child = LEFT_OPEN["Deployment", "letters-actor"]
    step = next_step(child, live(child, spec__replicas=7, metadata__labels={}), OWNER)
    assert step.verb == "apply" and step.body is not None
    assert step.body["spec"]["replicas"] == 7


@pytest.mark.parametrize(
    ("replicas", "expected"), [(2, ("leave", None)), (5, ("patch", {"replicas": 2}))], ids=["same", "scaled"]
)
def test_what_another_version_would_build_waits_for_the_next_start_but_scaling_does_not(
    replicas: int, expected: tuple[str, Any]
) -> None:
    older = live(STATEFUL_SET, spec__replicas=replicas, spec__serviceName="old")
    older["metadata"]["annotations"][names.HASH_ANNOTATION] = "of another version"
    assert of(next_step(STATEFUL_SET, older, OWNER)) == expected
    assert next_step(STATEFUL_SET, older, replace(OWNER, start=2)).verb == "apply"


@pytest.mark.parametrize(
    ("changes", "trainer_pods", "expected"),
    [
        ({"spec__suspend": True}, None, ("patch", {"suspend": False})),
        ({"spec__suspend": True, "metadata__annotations__inflight.dev/desired-hash": "x"}, None, ("wait", None)),
        ({"spec__suspend": True, "metadata__annotations__inflight.dev/desired-hash": "x"}, 1, ("wait", None)),
        ({"spec__suspend": True, "metadata__annotations__inflight.dev/desired-hash": "x"}, 0, ("delete", None)),
        ({"metadata__annotations__inflight.dev/desired-hash": "x"}, 0, ("patch", {"suspend": True})),
        ({"spec__suspend": True, "status__restarts": 1}, 0, ("delete", None)),
        ({"status__conditions": ended("Failed")}, 0, ("delete", None)),
    ],
)
def test_at_a_new_start_a_jobset_is_resumed_or_made_anew_when_its_last_pod_has_gone(
    changes: dict[str, Any], trainer_pods: int | None, expected: tuple[str, Any]
) -> None:
    owner = replace(OWNER, start=2, trainer_pods=trainer_pods)
    verb, detail = of(next_step(JOB_SET, live(JOB_SET, **changes), owner))
    assert (verb, None if verb == "wait" else detail) == expected


def test_a_jobset_of_this_start_is_never_written_whatever_it_looks_like() -> None:
    changed = live(JOB_SET, spec__suspend=True, spec__replicatedJobs=[], metadata__labels={})
    assert next_step(JOB_SET, changed, OWNER).verb == "leave"


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        (1, {}, ("leave", None)),
        (1, {"status__conditions": ended("Complete")}, ("leave", None)),
        (1, {"status__conditions": ended("Failed", "BackoffLimitExceeded")}, ("refuse", "ModelFetchFailed")),
        (2, {"status__conditions": ended("Failed")}, ("delete", None)),
        (2, {"metadata__annotations__inflight.dev/desired-hash": "x"}, ("delete", None)),
        (2, {"status__conditions": ended("Complete")}, ("patch", None)),
    ],
)
def test_a_model_that_could_not_be_fetched_is_fetched_again_at_the_next_start(
    start: int, changes: dict[str, Any], expected: tuple[str, Any]
) -> None:
    step = next_step(FETCH, live(FETCH, **changes), replace(OWNER, start=start))
    assert of(step) == expected
    if step.refusal is not None:
        assert step.refusal.stalled
        assert "BackoffLimitExceeded" in step.refusal.cause.message


def test_a_model_counts_as_fetched_only_for_the_start_that_it_was_fetched_for() -> None:
    complete = live(FETCH, status__conditions=ended("Complete"))
    assert model_fetched(complete, OWNER)
    assert not model_fetched(complete, replace(OWNER, start=2))
    assert not model_fetched(live(FETCH), OWNER)


@pytest.mark.parametrize(
    ("start", "changes", "expected"),
    [
        (2, {"spec__resources": {"requests": {"storage": "1Gi"}}}, {"resources": {"requests": {"storage": "10Gi"}}}),
        (2, {"spec__resources": {"requests": {"storage": "20Gi"}}}, None),
        (2, {"spec__resources": {"requests": {"storage": "10240Mi"}}}, None),
        (1, {"metadata__annotations__inflight.dev/start": None}, {}),
    ],
)
def test_a_claim_only_ever_grows_and_only_at_a_start(start: int, changes: dict[str, Any], expected: Any) -> None:
    step = next_step(CLAIM, live(CLAIM, **changes), replace(OWNER, start=start))
    assert step.verb == "patch" and step.body is not None
    assert (step.body.get("spec") or None) == (expected or None)
    shrunk = live(CLAIM, spec__resources={"requests": {"storage": "1Gi"}})
    assert next_step(CLAIM, shrunk, OWNER).verb == "leave"


def test_a_claim_takes_up_and_gives_up_its_owner() -> None:
    orphan = live(CLAIM, metadata__ownerReferences=None)
    step = next_step(CLAIM, orphan, OWNER)
    assert step.verb == "patch" and step.body is not None
    assert [one["uid"] for one in step.body["metadata"]["ownerReferences"]] == [UID]
    owned = live(KEPT_CLAIM, metadata__ownerReferences=[{"kind": "RLTrainingJob", "uid": UID}])
    step = next_step(KEPT_CLAIM, owned, OWNER)
    assert step.verb == "patch" and step.body is not None
    assert step.body["metadata"]["ownerReferences"] == []


@pytest.mark.parametrize(
    ("resume_from", "verb"),
    [
        (None, "refuse"),
        ("letters-00000000/checkpoints", "patch"),
        ("/letters-00000000/", "patch"),
        ("letters-11111111/checkpoints", "refuse"),
        ("other-00000000/checkpoints", "refuse"),
    ],
)
def test_a_claim_of_another_run_is_taken_only_when_the_job_names_that_run(resume_from: str | None, verb: str) -> None:
    other = live(KEPT_CLAIM)
    other["metadata"]["labels"][names.RUN_UID_LABEL] = FOREIGN
    step = next_step(KEPT_CLAIM, other, replace(OWNER, resume_from=resume_from))
    assert step.verb == verb
    if step.refusal is not None:
        assert step.refusal.cause.reason == "VolumeBelongsToAnotherRun"
        assert "resumeFrom to letters-00000000/checkpoints" in step.refusal.cause.message


@pytest.mark.parametrize(
    ("child", "changes", "expected"),
    [
        (JOB_SET, {}, ("patch", {"suspend": True})),
        (JOB_SET, {"spec__suspend": True}, ("leave", None)),
        (STATEFUL_SET, {}, ("patch", {"replicas": 0})),
        (STATEFUL_SET, {"spec__replicas": 0}, ("leave", None)),
        (DEPLOYMENT, {"metadata__deletionTimestamp": "2026-01-01T00:00:00Z"}, ("leave", None)),
        (FETCH, {}, ("delete", None)),
        (FETCH, {"status__conditions": ended("Complete")}, ("leave", None)),
    ],
)
def test_a_workload_is_stopped_once(child: Child, changes: dict[str, Any], expected: tuple[str, Any]) -> None:
    step = stop_step(live(child, **changes))
    assert of(step) == expected
    if step.body is not None:
        assert step.body["metadata"] == {"uid": "child-uid"}
