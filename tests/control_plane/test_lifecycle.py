"""The life of a job on a real control plane: suspend and resume, its ends, claims, scaling, repair, upgrade."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from control_plane.cluster import AuditEvent, Cluster, end_pods
from control_plane.expected_refusals import refusals
from control_plane.jobs import Jobs, condition, job
from control_plane.operator_process import Coordinators, OperatorProcess, operator_for, state
from control_plane.watching import BUSY, KSTATUS, READY, STALLED, JobWatch, PodWatch
from inflight_operator import names
from inflight_operator.store import WATCHED

REPAIR_S = 5.0
SOON_S = 5.0
SHORT: dict[str, Any] = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 1}}}
DEADLINE_S = 16.0
"""Grace period and margin of one of these roles."""
STOPPED = (
    ("deployments", "-actor"),
    ("jobsets", "-t"),
    ("statefulsets", "-inference"),
    ("statefulsets", "-coordinator"),
)
ROLES = {"trainer": "trainer", "inference": "inference", "actors": "actor", "coordinator": "coordinator"}
"""Parts of the spec, and the roles that they are of."""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """One for all tests here but those that need operators of their own."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def coordinators() -> Iterator[Coordinators]:
    """Answers in place of the jobs' coordinators."""
    with Coordinators() as answering:
        yield answering


@pytest.fixture(scope="module")
def watched(admin: client.ApiClient, namespace: str) -> Iterator[JobWatch]:
    """Every status that any job here ever has is checked."""
    with JobWatch(admin, namespace) as watching:
        yield watching
    assert watching.wrong == []


@pytest.fixture(scope="module", autouse=True)
def operator(
    cluster: Cluster,
    namespace: str,
    coordinators: Coordinators,
    watched: JobWatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    """One operator; all that it was refused is looked at in the end."""
    directory = tmp_path_factory.mktemp("operator")
    since = cluster.audit.position()
    with operator_for(cluster, namespace, directory, coordinator_url=coordinators.url) as process:
        process.start()
        yield process
        sys.stdout.write(process.log)
        refused = refusals(cluster.audit.events(since), [process.user])
    assert not refused


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, namespace: str) -> Jobs:
    """The namespace, as a user handles it."""
    return Jobs(cluster.kubectl, namespace)


@pytest.fixture(scope="module")
def steady(jobs: Jobs, operator: OperatorProcess) -> str:
    """A job that runs and that nobody stops."""
    jobs.create(quick("steady"))
    jobs.wait_phase("steady", "Running")
    return "steady"


@pytest.fixture(scope="module")
def never_at_rest(jobs: Jobs, operator: OperatorProcess) -> str:
    """A job for those that stop and start it; it leaves the number of actors open and may not restart its trainer."""
    parts = {part: overlay(role, "GOES", "STAYS") for part, role in ROLES.items()}
    parts["trainer"]["maxRestarts"] = 0
    parts["actors"]["replicas"] = None
    jobs.create(quick("restless", **parts))
    return "restless"


@pytest.fixture
def restless(jobs: Jobs, never_at_rest: str) -> str:
    """The same, running."""
    jobs.resume(never_at_rest)
    jobs.wait_phase(never_at_rest, "Running")
    return never_at_rest


def overlay(role: str, *variables: str) -> dict[str, Any]:
    """Part of a role: its pods have these variables."""
    env = [{"name": one, "value": "x"} for one in variables]
    return {"podTemplate": {"spec": {**SHORT["podTemplate"]["spec"], "containers": [{"name": role, "env": env}]}}}


def quick(name: str, **spec: Any) -> dict[str, Any]:
    """A job whose pods have a second to end."""
    roles = {role: {**SHORT, **spec.pop(role, {})} for role in ("inference", "actors", "trainer", "coordinator")}
    roles["inference"] = {"replicas": 1, **roles["inference"]}
    return job(name, **roles, **spec)


def running(jobs: Jobs, made: dict[str, Any]) -> str:
    """Create a job and wait until it runs."""
    jobs.create(made)
    jobs.wait_phase(made["metadata"]["name"], "Running")
    return str(made["metadata"]["name"])


def kstatus(status: dict[str, Any]) -> dict[str, str]:
    """What GitOps tools look at."""
    return {one["type"]: one["status"] for one in status["conditions"] if one["type"] in KSTATUS}


def one_pod(jobs: Jobs, name: str, role: str) -> str:
    """Name of a role's only pod that is not being deleted."""
    found = [pod["metadata"] for pod in jobs.pods(name, role)]
    (alive,) = [one["name"] for one in found if not one.get("deletionTimestamp")]
    return str(alive)


def children(jobs: Jobs, name: str) -> list[str]:
    """All children of a job, as ``Kind/name``."""
    selector = f"{names.JOB_LABEL}={name}"
    found = [one for kind in WATCHED for one in jobs.reader.list(kind, jobs.namespace, selector)]
    return sorted(f"{one['kind']}/{one['metadata']['name']}" for one in found)


def by_operator(cluster: Cluster, operator: OperatorProcess, since: int) -> list[AuditEvent]:
    """What the operator has written, in order."""
    return [one for one in cluster.audit.events(since) if one.user == operator.user and one.is_write]


def template(child: dict[str, Any]) -> dict[str, Any]:
    """Pod template of a workload."""
    spec = child["spec"]
    if child["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    found: dict[str, Any] = spec["template"]
    return found


def gone(jobs: Jobs, *what: str, deadline_s: float = 30.0) -> None:
    """Wait until objects are gone."""
    for one in what:
        jobs.eventually(f"{one} is gone", lambda one=one: jobs.child(one) is None, deadline_s)  # type: ignore[misc]


# Suspend and resume


def test_a_suspend_stops_role_by_role_and_a_resume_brings_all_back(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, restless: str
) -> None:
    starts = jobs.status(restless)["starts"]
    pods = {role: [pod["metadata"]["name"] for pod in jobs.pods(restless, role)] for role in names.ROLES}
    since = cluster.audit.position()
    jobs.suspend(restless)
    status = jobs.wait_phase(restless, "Suspended")

    assert jobs.pods(restless) == []
    assert kstatus(status) == READY
    assert status["observedGeneration"] == jobs.get(restless)["metadata"]["generation"]
    for kind, value in {"Suspended": "True", "InferenceReady": "False", "TrainerRunning": "False"}.items():
        found = condition(status, kind)
        assert found is not None and (found["status"], found["reason"]) == (value, "Suspended")
    events = cluster.audit.events(since)
    order = [(one.resource, one.name) for one in events if one.user == operator.user and one.verb == "patch"]
    stops = [(resource, f"{restless}{suffix}") for resource, suffix in STOPPED]
    assert [one for one in order if one in stops] == stops
    for role, (resource, name) in zip(("actor", "trainer", "inference"), stops[1:], strict=True):
        next_stop = next(i for i, one in enumerate(events) if (one.resource, one.name) == (resource, name))
        deletes = [i for i, one in enumerate(events) if one.verb == "delete" and one.name in pods[role]]
        assert deletes and max(deletes) < next_stop, f"{name} was stopped before {role} was gone"

    # Whoever starts a part of it meanwhile has it stopped again.
    servers, trainer = f"statefulset/{restless}-inference", f"jobset/{restless}-t"
    kubectl(jobs, "scale", servers, "--replicas=2")
    kubectl(jobs, "patch", trainer, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    jobs.eventually("no servers are wanted", lambda: jobs.there(servers)["spec"]["replicas"] == 0, REPAIR_S)
    jobs.eventually("no trainer is wanted", lambda: jobs.there(trainer)["spec"]["suspend"], REPAIR_S)
    jobs.eventually("no pod is left", lambda: jobs.pods(restless) == [])
    assert jobs.status(restless)["phase"] == "Suspended"

    jobs.resume(restless)
    status = jobs.wait_phase(restless, "Running")
    assert kstatus(status) == READY
    assert status["starts"] == starts + 1
    assert "suspendingSince" not in status


def test_a_role_that_does_not_end_holds_the_next_one_up_only_until_its_deadline(jobs: Jobs, restless: str) -> None:
    name = restless
    pod = one_pod(jobs, name, "actor")
    jobs.hold(pod)
    began = time.monotonic()
    jobs.suspend(name)
    told = jobs.wait_reason(name, "Suspended", "Suspending")
    jobs.eventually(
        "what it waits for is told",
        lambda: jobs.condition(name, "Suspended")["message"] == "waiting for 1 actor pod to end",  # type: ignore[index]
    )
    assert told["status"] == "False"
    assert kstatus(jobs.status(name)) == BUSY
    jobs.eventually("the trainer is stopped", lambda: jobs.there(f"jobset/{name}-t")["spec"]["suspend"], 30)
    assert DEADLINE_S - 2 < time.monotonic() - began < DEADLINE_S + 4
    for later in ("inference", "coordinator"):
        jobs.eventually(f"{later} is stopped", lambda later=later: jobs.pods(name, later) == [], 10)  # type: ignore[misc]
    assert jobs.status(name)["phase"] == "Suspending"
    jobs.release(pod)
    jobs.wait_phase(name, "Suspended")
    assert jobs.pods(name) == []


def test_a_job_created_suspended_makes_no_child_at_all(cluster: Cluster, jobs: Jobs, operator: OperatorProcess) -> None:
    since = cluster.audit.position()
    jobs.create(quick("asleep", suspend=True))
    status = jobs.wait_phase("asleep", "Suspended")
    assert kstatus(status) == READY
    assert {one.resource for one in by_operator(cluster, operator, since)} <= {"rltrainingjobs/status", "events"}
    assert children(jobs, "asleep") == []
    jobs.resume("asleep")
    assert jobs.wait_phase("asleep", "Running")["starts"] == 1


def test_quick_suspends_and_resumes_never_make_a_second_trainer(
    admin: client.ApiClient, cluster: Cluster, jobs: Jobs, operator: OperatorProcess, restless: str
) -> None:
    name = restless
    starts = jobs.status(name)["starts"]
    pod = one_pod(jobs, name, "trainer")
    since = cluster.audit.position()
    uid = jobs.there(f"jobset/{name}-t")["metadata"]["uid"]
    with PodWatch(admin, jobs.namespace, names.selector_text(name, "trainer")) as trainers:
        jobs.hold(pod)
        for _ in range(3):
            jobs.suspend(name)
            jobs.eventually("the JobSet is suspended", lambda: jobs.there(f"jobset/{name}-t")["spec"]["suspend"])
            jobs.resume(name)
            jobs.eventually("the JobSet is resumed", lambda: not jobs.there(f"jobset/{name}-t")["spec"]["suspend"])
        assert trainers.seen == {pod}
        jobs.release(pod)
        jobs.eventually("there is a new trainer", lambda: len(trainers.seen) > 1)
        status = jobs.wait_phase(name, "Running")
        assert trainers.most == 1
    assert status["starts"] == starts + 3
    assert jobs.there(f"jobset/{name}-t")["metadata"]["uid"] == uid
    assert [one for one in cluster.audit.events(since) if one.user == operator.user and 400 <= one.code < 500] == []


def test_a_trainer_that_ends_with_an_error_when_stopped_costs_neither_the_run_nor_a_restart(
    jobs: Jobs, restless: str
) -> None:
    pod = one_pod(jobs, restless, "trainer")
    jobs.hold(pod)
    jobs.suspend(restless)
    jobs.eventually("the trainer ends", lambda: jobs.there(f"pod/{pod}")["metadata"].get("deletionTimestamp"))
    jobs.end_held(pod, exit_code=143)
    jobs.release(pod)
    assert jobs.wait_phase(restless, "Suspended", "Failed")["phase"] == "Suspended"
    jobs.resume(restless)
    status = jobs.wait_phase(restless, "Running", "Failed")
    assert (status["phase"], status["restarts"]) == ("Running", 0)


def test_a_resume_makes_everything_anew_that_the_changed_spec_asks_for(jobs: Jobs, restless: str) -> None:
    what = ("jobset/-t", "statefulset/-inference", "deployment/-actor", "statefulset/-coordinator")
    what = tuple(one.replace("/", f"/{restless}") for one in what)
    before = [jobs.there(one) for one in what]
    assert all({"GOES", "STAYS"} <= variables(one) for one in before)
    jobs.suspend(restless)
    jobs.wait_phase(restless, "Suspended")
    parts = {part: overlay(role, "STAYS") for part, role in ROLES.items()}
    jobs.resume(restless, algorithm={"steps": 77}, **parts)
    jobs.wait_phase(restless, "Running")
    for old, one in zip(before, what, strict=True):
        new = jobs.there(one)
        assert "STAYS" in variables(new) and "GOES" not in variables(new), one
        made_anew = new["metadata"]["uid"] != old["metadata"]["uid"]
        assert made_anew == (new["kind"] == "JobSet")
    for pod in jobs.pods(restless):
        assert "GOES" not in {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}
    (config,) = [one for one in children(jobs, restless) if one.startswith("ConfigMap/")]
    assert '"steps": 77' in jobs.there(config)["data"]["trainer.json"]


def test_a_changed_trainer_waits_until_the_one_before_is_gone(
    admin: client.ApiClient, jobs: Jobs, restless: str
) -> None:
    pod = one_pod(jobs, restless, "trainer")
    before = jobs.there(f"jobset/{restless}-t")["metadata"]["uid"]
    with PodWatch(admin, jobs.namespace, names.selector_text(restless, "trainer")) as trainers:
        jobs.hold(pod)
        jobs.suspend(restless)
        jobs.eventually("the JobSet is suspended", lambda: jobs.there(f"jobset/{restless}-t")["spec"]["suspend"])
        jobs.resume(restless, algorithm={"steps": 88})
        jobs.wait_reason(restless, "ResourcesCreated", "WaitingForDeletion")
        assert jobs.there(f"jobset/{restless}-t")["metadata"]["uid"] == before
        jobs.release(pod)
        jobs.eventually("there is a new trainer", lambda: len(trainers.seen) > 1)
        jobs.wait_phase(restless, "Running")
        assert trainers.most == 1
    assert jobs.there(f"jobset/{restless}-t")["metadata"]["uid"] != before


def test_code_stays_as_it_was_started_until_a_resume(cluster: Cluster, jobs: Jobs, operator: OperatorProcess) -> None:
    def code(text: str) -> str:
        data = {"task.py": text}
        return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": data})

    def copies() -> list[str]:
        found = jobs.reader.list("ConfigMap", jobs.namespace, names.selector_text("coded", "code"))
        return [one["data"]["task.py"] for one in found]

    jobs.kubectl("apply", "-n", jobs.namespace, "-f", "-", stdin=code("one"))
    name = running(jobs, quick("coded", environment={"entrypoint": "task:Task", "configMap": "mine"}))
    since = cluster.audit.position()
    jobs.kubectl("apply", "-n", jobs.namespace, "-f", "-", stdin=code("two"))
    jobs.patch(name, {"lifecycle": {"ttlSecondsAfterFinished": 60}})
    generation = jobs.get(name)["metadata"]["generation"]
    jobs.eventually("it was looked at again", lambda: jobs.status(name)["observedGeneration"] == generation)
    assert copies() == ["one"]
    mine = [one for one in by_operator(cluster, operator, since) if one.name.startswith(name)]
    assert {one.resource for one in mine} <= {"rltrainingjobs/status", "events"}
    jobs.suspend(name)
    jobs.wait_phase(name, "Suspended")
    jobs.resume(name)
    jobs.wait_phase(name, "Running")
    jobs.eventually("the copy of before is gone", lambda: copies() == ["two"])
    (copy,) = jobs.reader.list("ConfigMap", jobs.namespace, names.selector_text(name, "code"))
    volumes = template(jobs.there(f"deployment/{name}-actor"))["spec"]["volumes"]
    assert copy["metadata"]["name"] in [one.get("configMap", {}).get("name") for one in volumes]


def variables(child: dict[str, Any]) -> set[str]:
    """Names of the variables of a workload's first container."""
    return {variable["name"] for variable in template(child)["spec"]["containers"][0]["env"]}


# Ends


def test_a_run_that_is_done_holds_nothing_keeps_its_numbers_and_is_not_run_again(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators, watched: JobWatch
) -> None:
    made = quick("done")
    key = f"{jobs.namespace}/done"
    coordinators.states[key] = state(step=9, reward=0.5)
    jobs.kubectl("apply", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(made))
    jobs.wait_phase("done", "Running")
    coordinators.states[key] = state(step=10, reward=0.75, outcome="succeeded")
    end_pods(cluster.kubectl, jobs.namespace, names.selector_text("done", "trainer"))
    ended = time.monotonic()
    gone(jobs, "deployment/done-actor", "statefulset/done-inference", deadline_s=SOON_S)
    status = jobs.wait_phase("done", "Succeeded")
    phases = ["Pending", "Starting", "Running", "Completing", "Succeeded"]
    jobs.eventually("each phase was seen", lambda: watched.phases["done"] == phases)
    assert time.monotonic() - ended < 2 * SOON_S
    assert kstatus(status) == READY
    assert (status["progress"]["step"], status["progress"]["rewardMean"]) == (10, 0.75)
    assert "activeSince" not in status and status["completionTime"] and "endpoints" not in status

    # The TTL takes the rest, and leaves the resource with its status, and the claims.
    jobs.patch("done", {"lifecycle": {"ttlSecondsAfterFinished": 0}})
    claims = ["PersistentVolumeClaim/done-checkpoint", "PersistentVolumeClaim/done-coordinator"]
    jobs.eventually("only the claims are left", lambda: children(jobs, "done") == claims)
    gone(jobs, "secret/done-token")
    created = jobs.wait_reason("done", "ResourcesCreated", "CleanedUp")
    assert created["status"] == "False"
    status = jobs.status("done")
    assert (status["phase"], status["progress"]["step"], kstatus(status)) == ("Succeeded", 10, READY)

    since = cluster.audit.position()
    jobs.kubectl("apply", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(made))
    operator.stop()
    operator.start()
    operator.wait_watching()
    jobs.patch("done", {"suspend": True})
    jobs.eventually("the operator has seen that", lambda: jobs.status("done")["observedGeneration"] >= 3)
    jobs.patch("done", {"suspend": False})
    jobs.eventually("and that", lambda: jobs.status("done")["observedGeneration"] >= 4)
    assert jobs.status("done")["phase"] == "Succeeded"
    writes = [one for one in by_operator(cluster, operator, since) if one.resource != "rltrainingjobs/status"]
    assert [one for one in writes if one.name.startswith("done")] == []
    assert children(jobs, "done") == claims


def test_a_trainer_beyond_its_restarts_fails_the_job_with_its_last_words(cluster: Cluster, jobs: Jobs) -> None:
    name = running(jobs, quick("broken"))
    selector = names.selector_text(name, "trainer")
    end_pods(cluster.kubectl, jobs.namespace, selector, exit_code=3, message="out of memory at step 7")
    jobs.eventually("it is restarted", lambda: jobs.status(name)["restarts"] == 1)
    assert jobs.status(name)["phase"] == "Running"
    jobs.eventually("it trains again", lambda: jobs.status(name)["trainer"]["ready"] == 1)
    end_pods(cluster.kubectl, jobs.namespace, selector, exit_code=4, message="out of memory at step 9")
    status = jobs.wait_phase(name, "Failed")
    assert kstatus(status) == STALLED
    assert (status["restarts"], status["completionTime"] != "") == (1, True)
    for kind in ("Failed", "Ready", "Stalled"):
        found = condition(status, kind)
        assert found is not None and found["reason"] == "TrainerFailed"
        assert "exit code 4: out of memory at step 9" in found["message"]

    # Kept for a look at it until somebody has had it.
    assert [pod["status"]["phase"] for role in ("actor", "inference") for pod in jobs.pods(name, role)] == [
        "Running"
    ] * 2
    jobs.patch(name, {"lifecycle": {"onFailure": "delete"}})
    gone(jobs, f"deployment/{name}-actor", f"statefulset/{name}-inference", f"statefulset/{name}-coordinator")
    assert [pod["status"]["phase"] for pod in jobs.pods(name, "trainer")] == ["Failed"]
    jobs.patch(name, {"lifecycle": {"ttlSecondsAfterFinished": 1}})
    claims = [f"PersistentVolumeClaim/{name}-checkpoint", f"PersistentVolumeClaim/{name}-coordinator"]
    jobs.eventually("only the claims are left", lambda: children(jobs, name) == claims)
    found = jobs.condition(name, "Failed")
    assert found is not None and "out of memory at step 9" in found["message"]


def test_bad_input_of_a_trainer_fails_the_job_without_a_restart(cluster: Cluster, jobs: Jobs) -> None:
    name = running(jobs, quick("wrong"))
    selector = names.selector_text(name, "trainer")
    end_pods(cluster.kubectl, jobs.namespace, selector, exit_code=2, message="cannot train: no such model")
    status = jobs.wait_phase(name, "Failed")
    assert status["restarts"] == 0
    found = condition(status, "Failed")
    assert found is not None and found["reason"] == "TrainerFailed"
    assert "exit code 2: cannot train: no such model" in found["message"]


def test_a_trainer_is_drained_more_often_than_it_may_be_restarted(jobs: Jobs) -> None:
    name = running(jobs, quick("drained"))
    for times in (1, 2, 3):
        pod = one_pod(jobs, name, "trainer")
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": jobs.namespace}}
        path = f"/api/v1/namespaces/{jobs.namespace}/pods/{pod}/eviction"
        jobs.hold(pod)
        jobs.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
        jobs.end_held(pod, exit_code=143)
        jobs.release(pod)
        jobs.eventually("it is started again", lambda n=times: jobs.status(name)["restarts"] == n)
        jobs.eventually("it trains again", lambda: jobs.status(name)["trainer"]["ready"] == 1)
    assert jobs.there(f"jobset/{name}-t")["status"].get("restartsCountTowardsMax", 0) == 0
    assert jobs.status(name)["phase"] == "Running"


def test_only_active_time_counts_against_the_deadline(jobs: Jobs) -> None:
    limit = 8
    name = "timed"
    jobs.create(quick(name, lifecycle={"activeDeadlineSeconds": limit}))
    jobs.wait_phase(name, "Starting", "Running")
    jobs.suspend(name)
    suspended = jobs.wait_phase(name, "Suspended")
    until = time.monotonic() + limit
    jobs.eventually("longer than the deadline has passed", lambda: time.monotonic() > until)
    assert jobs.status(name)["activeSeconds"] == suspended["activeSeconds"] < limit
    jobs.resume(name)
    status = jobs.wait_phase(name, "Failed")
    found = condition(status, "Failed")
    assert found is not None and found["reason"] == "DeadlineExceeded"
    assert limit <= status["activeSeconds"] <= limit + 2
    assert kstatus(status) == STALLED
    gone(jobs, *(f"{one}{name}{end}" for one, end in (("jobset/", "-t"), ("deployment/", "-actor"))))
    jobs.eventually("no pod is left", lambda: jobs.pods(name) == [])


# Claims


def test_claims_go_with_the_job_or_stay_as_it_says(jobs: Jobs) -> None:
    jobs.kubectl.create([claim("mine")], "-n", jobs.namespace)
    jobs.create(quick("owning", checkpoint={"onDelete": "Delete"}), quick("sharing", checkpoint={"claimName": "mine"}))
    for name in ("owning", "sharing"):
        jobs.wait_phase(name, "Running")
    volumes = template(jobs.there("jobset/sharing-t"))["spec"]["volumes"]
    assert [one["persistentVolumeClaim"]["claimName"] for one in volumes if one["name"] == "checkpoints"] == ["mine"]
    assert jobs.child("pvc/sharing-checkpoint") is None
    jobs.kubectl("delete", "rltj/owning", "rltj/sharing", "-n", jobs.namespace)
    gone(jobs, *(f"pvc/{one}" for one in ("owning-checkpoint", "owning-coordinator", "sharing-coordinator")))
    mine = jobs.there("pvc/mine")["metadata"]
    assert "deletionTimestamp" not in mine and "ownerReferences" not in mine


def test_a_job_of_the_same_name_inherits_nothing_unless_it_says_so(jobs: Jobs) -> None:
    name = running(jobs, quick("again"))
    first = jobs.get(name)["metadata"]["uid"]
    ledger, checkpoints = (jobs.there(f"pvc/{name}-{what}")["metadata"] for what in ("coordinator", "checkpoint"))
    pod = one_pod(jobs, name, "coordinator")
    jobs.hold(pod)
    jobs.kubectl("delete", f"rltj/{name}", "-n", jobs.namespace)
    jobs.create(quick(name))
    # Its name is taken as long as the old one's pod holds it.
    jobs.wait_reason(name, "ResourcesCreated", "WaitingForDeletion")
    assert kstatus(jobs.status(name)) == BUSY
    jobs.release(pod)
    refused = jobs.wait_reason(name, "ResourcesCreated", "VolumeBelongsToAnotherRun")
    directory = f"{name}-{first[:8]}/checkpoints"
    assert first in refused["message"] and directory in refused["message"]
    assert jobs.pods(name) == []
    assert jobs.there(f"pvc/{name}-checkpoint")["metadata"]["labels"][names.RUN_UID_LABEL] == first

    jobs.suspend(name)
    jobs.wait_phase(name, "Suspended")
    jobs.resume(name, checkpoint={"resumeFrom": directory})
    jobs.wait_phase(name, "Running")
    second = jobs.get(name)["metadata"]["uid"]
    adopted = jobs.there(f"pvc/{name}-checkpoint")["metadata"]
    assert (adopted["uid"], adopted["labels"][names.RUN_UID_LABEL]) == (checkpoints["uid"], second)
    fresh = jobs.there(f"pvc/{name}-coordinator")["metadata"]
    assert fresh["uid"] != ledger["uid"]
    assert [owner["uid"] for owner in fresh["ownerReferences"]] == [second]


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


# Scaling


def test_a_running_job_is_scaled_by_its_subresource_and_by_its_spec(jobs: Jobs, steady: str) -> None:
    before = template(jobs.there(f"statefulset/{steady}-inference"))
    jobs.kubectl("scale", f"rltj/{steady}", "--replicas=3", "-n", jobs.namespace)
    jobs.patch(steady, {"actors": {"replicas": 2}})

    def scaled() -> bool:
        status = jobs.status(steady)
        return bool(status["inference"]["ready"] == 3 and status["actors"]["ready"] == 2)

    jobs.eventually("three servers and two actors are ready", scaled)
    path = f"/apis/inflight.dev/v1alpha1/namespaces/{jobs.namespace}/rltrainingjobs/{steady}/scale"
    scale = json.loads(jobs.kubectl("get", "--raw", path))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    selected = jobs.kubectl.get("pods", "-n", jobs.namespace, "-l", scale["status"]["selector"])["items"]
    assert sorted(pod["metadata"]["name"] for pod in selected) == [f"{steady}-inference-{i}" for i in range(3)]
    assert template(jobs.there(f"statefulset/{steady}-inference")) == before
    status = jobs.status(steady)
    assert (status["phase"], status["starts"]) == ("Running", 1)
    jobs.kubectl("scale", f"rltj/{steady}", "--replicas=1", "-n", jobs.namespace)
    jobs.eventually("one server is left", lambda: len(jobs.pods(steady, "inference")) == 1)


def test_a_count_that_the_spec_leaves_open_belongs_to_the_autoscaler(jobs: Jobs, restless: str) -> None:
    name, deployment = restless, f"deployment/{restless}-actor"
    assert jobs.there(deployment)["spec"]["replicas"] == 1
    jobs.kubectl("scale", deployment, "--replicas=4", "-n", jobs.namespace)
    jobs.eventually("four actors are ready", lambda: jobs.status(name)["actors"]["ready"] == 4)

    jobs.kubectl("set", "image", deployment, "actor=wrong", "-n", jobs.namespace)
    jobs.eventually("the image is put right", lambda: image(jobs.there(deployment)) != "wrong", REPAIR_S)
    assert jobs.there(deployment)["spec"]["replicas"] == 4

    jobs.suspend(name)
    status = jobs.wait_phase(name, "Suspended")
    assert (jobs.there(deployment)["spec"]["replicas"], status["actors"]["replicasBeforeSuspend"]) == (0, 4)
    jobs.resume(name)
    jobs.wait_phase(name, "Running")
    assert jobs.there(deployment)["spec"]["replicas"] == 4


def image(child: dict[str, Any]) -> str:
    """Image of a workload's first container."""
    return str(template(child)["spec"]["containers"][0]["image"])


# Repair

EDITS: dict[str, Callable[[Jobs, str], None]] = {
    "image": lambda jobs, name: kubectl(jobs, "set", "image", f"statefulset/{name}-inference", "inference=wrong"),
    "variable": lambda jobs, name: kubectl(jobs, "set", "env", f"deployment/{name}-actor", "HF_HUB_OFFLINE=0"),
    "label": lambda jobs, name: kubectl(
        jobs, "label", f"service/{name}-coordinator", "app.kubernetes.io/component=x", "--overwrite"
    ),
    "selector": lambda jobs, name: kubectl(
        jobs,
        "patch",
        f"service/{name}-inference",
        "--type=merge",
        "-p",
        '{"spec":{"selector":{"inflight.dev/role":"x"}}}',
    ),
    "replicas": lambda jobs, name: kubectl(jobs, "scale", f"deployment/{name}-actor", "--replicas=7"),
}


def kubectl(jobs: Jobs, *arguments: str) -> None:
    jobs.kubectl(*arguments, "-n", jobs.namespace)


def essence(jobs: Jobs, name: str) -> dict[str, Any]:
    """What the operator asks of each child of a job."""
    selector = f"{names.JOB_LABEL}={name}"
    found = [one for kind in WATCHED for one in jobs.reader.list(kind, jobs.namespace, selector)]
    wanted: dict[str, Any] = {}
    for one in found:
        metadata, spec = one["metadata"], dict(one.get("spec", {}))
        for assigned in ("clusterIP", "clusterIPs"):
            spec.pop(assigned, None)
        kept = {part: metadata.get(part) for part in ("labels", "ownerReferences")}
        if one["kind"] != "Job" and not metadata.get("deletionTimestamp"):
            wanted[f"{one['kind']}/{metadata['name']}"] = {**kept, "spec": spec, "data": one.get("data")}
    return wanted


@pytest.mark.parametrize("edit", EDITS)
def test_a_child_changed_by_hand_is_put_right(jobs: Jobs, steady: str, edit: str) -> None:
    before = essence(jobs, steady)
    EDITS[edit](jobs, steady)
    jobs.eventually("it is as before", lambda: essence(jobs, steady) == before, REPAIR_S)


def test_children_deleted_by_hand_are_made_again(jobs: Jobs, steady: str) -> None:
    before = essence(jobs, steady)
    deleted = [one for one in before if one.partition("/")[0] not in ("JobSet", "PersistentVolumeClaim")]
    assert {one.partition("/")[0] for one in deleted} == set(WATCHED) - {"JobSet", "PersistentVolumeClaim", "Job"}
    uids = {one: jobs.there(one)["metadata"]["uid"] for one in deleted}
    kubectl(jobs, "delete", *deleted, "--wait=false")
    jobs.eventually("they are as before", lambda: essence(jobs, steady) == before, REPAIR_S)
    assert [one for one in deleted if jobs.there(one)["metadata"]["uid"] == uids[one]] == []
    jobs.eventually("it is ready again", lambda: kstatus(jobs.status(steady)) == READY)


def test_a_jobset_that_somebody_else_suspends_is_shown_and_not_fought(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, steady: str
) -> None:
    since = cluster.audit.position()
    kubectl(jobs, "patch", f"jobset/{steady}-t", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    for kind in ("Ready", "TrainerRunning"):
        assert jobs.wait_reason(steady, kind, "SuspendedElsewhere")["status"] == "False"
    assert kstatus(jobs.status(steady)) == BUSY
    # A change of the job's own does not move it either.
    jobs.patch(steady, {"actors": {"replicas": 1}})
    jobs.eventually("one actor is left", lambda: jobs.status(steady)["actors"]["desired"] == 1)
    assert jobs.there(f"jobset/{steady}-t")["spec"]["suspend"]
    assert [one for one in by_operator(cluster, operator, since) if one.resource == "jobsets"] == []
    kubectl(jobs, "patch", f"jobset/{steady}-t", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    jobs.eventually("it is ready again", lambda: kstatus(jobs.status(steady)) == READY)


def test_a_deleted_jobset_is_made_again_when_its_trainer_is_gone(admin: client.ApiClient, jobs: Jobs) -> None:
    name = running(jobs, quick("twin"))
    pod = one_pod(jobs, name, "trainer")
    with PodWatch(admin, jobs.namespace, names.selector_text(name, "trainer")) as trainers:
        jobs.hold(pod)
        kubectl(jobs, "delete", f"jobset/{name}-t", "--wait=false")
        jobs.wait_reason(name, "ResourcesCreated", "WaitingForDeletion")
        assert jobs.child(f"jobset/{name}-t") is None
        jobs.release(pod)
        jobs.eventually("there is a new trainer", lambda: len(trainers.seen) > 1)
        jobs.eventually("it is ready again", lambda: kstatus(jobs.status(name)) == READY)
        assert trainers.most == 1


# Upgrade

FLEET_S = 90.0


def test_an_upgrade_touches_no_running_job_until_it_is_resumed(
    cluster: Cluster, coordinators: Coordinators, tmp_path: Path
) -> None:
    with cluster.namespace() as place:
        jobs = Jobs(cluster.kubectl, place)
        fleet = [f"fleet-{number}" for number in range(5)]
        with operator_for(cluster, place, tmp_path / "old", coordinator_url=coordinators.url) as old:
            old.start()
            jobs.create(*(quick(name) for name in fleet))
            for name in fleet:
                jobs.wait_phase(name, "Running", deadline_s=FLEET_S)
            images = jobs.status(fleet[0])["images"]
            old.stop()
        since = cluster.audit.position()
        with operator_for(cluster, place, tmp_path / "new", coordinator_url=coordinators.url, shm_size="1Gi") as new:
            new.become_newer()
            new.start()
            new.wait_watching()
            # It works, and sees them all: each is scaled, and nothing else.
            for name in fleet:
                jobs.patch(name, {"actors": {"replicas": 2}})
            for name in fleet:
                jobs.eventually(f"{name} is scaled", lambda name=name: jobs.status(name)["actors"]["ready"] == 2)  # type: ignore[misc]
            written = [one for one in by_operator(cluster, new, since) if one.resource != "rltrainingjobs/status"]
            scaled = [("patch", "deployments", f"{name}-actor") for name in fleet]
            assert sorted((one.verb, one.resource, one.name) for one in written if one.resource != "events") == scaled
            assert all(jobs.status(name)["images"] == images for name in fleet)

            for name in fleet[:2]:
                jobs.suspend(name)
            for name in fleet[:2]:
                jobs.wait_phase(name, "Suspended", deadline_s=FLEET_S)
                jobs.resume(name)
            for name in fleet[:2]:
                status = jobs.wait_phase(name, "Running", deadline_s=FLEET_S)
                assert (status["builderRevision"], status["images"]["trainer"]) == ("next", "example.org/trainer:next")
                for what in (f"jobset/{name}-t", f"deployment/{name}-actor", f"statefulset/{name}-coordinator"):
                    assert image(jobs.there(what)).startswith("example.org/")
                ports = template(jobs.there(f"deployment/{name}-actor"))["spec"]["containers"][0]["ports"]
                assert [port["containerPort"] for port in ports] == [7777]
            assert jobs.status(fleet[4])["images"] == images
