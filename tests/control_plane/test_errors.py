"""Whatever keeps a job from running is told in its status, in the server's words, and heals when the cause goes.

One operator serves all tests of this module, each in a namespace of its own.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.cluster import Cluster, KubectlError, eventually
from control_plane.jobs import Jobs, condition, job
from control_plane.operator_process import CLUSTER_ROLE, OperatorProcess, operator_for
from control_plane.troubles import (
    Told,
    calls,
    dead_webhook,
    limit_range,
    obstacle,
    patched,
    policy,
    quota,
)

NOBODY = "http://127.0.0.1:9/{namespace}/{service}"
RUNS_S = 45.0
"""Longest time until a job runs once nothing is in its way: two more tries of ours, or of a controller."""


@pytest.fixture(scope="module")
def home(cluster: Cluster) -> Iterator[str]:
    """The operator's own namespace."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def everywhere(cluster: Cluster, home: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator for all namespaces."""
    directory = tmp_path_factory.mktemp("operator")
    with operator_for(cluster, "", directory, account_namespace=home, coordinator_url=NOBODY) as process:
        process.start()
        process.wait_watching()
        yield process
        sys.stdout.write(process.log)


@pytest.fixture(autouse=True)
def survives(everywhere: OperatorProcess) -> Iterator[None]:
    """No test may end the operator, or make it raise."""
    before = len(everywhere.log)
    yield
    assert everywhere.running()
    assert "Traceback" not in everywhere.log[before:]


@pytest.fixture
def told(jobs: Jobs) -> Told:
    """What the job ``a`` says."""
    return Told(jobs, "a")


def create(jobs: Jobs, **spec: Any) -> dict[str, Any]:
    """Create the job ``a``."""
    made = job("a", **spec)
    jobs.create(made)
    return made


# --- children that the API server refuses -----------------------------------------------------------------------------

Hindrance = Callable[[Cluster, str], contextlib.AbstractContextManager[Any]]
REFUSED: dict[str, tuple[Hindrance, str, str, str]] = {
    "quota on StatefulSets": (
        lambda cluster, ns: quota(cluster, ns, {"count/statefulsets.apps": "0"}),
        "QuotaExceeded",
        "StatefulSet a-coordinator",
        "exceeded quota: small, requested: count/statefulsets.apps=1, used: count/statefulsets.apps=0",
    ),
    "quota on claims": (
        lambda cluster, ns: quota(cluster, ns, {"persistentvolumeclaims": "1"}),
        "QuotaExceeded",
        "PersistentVolumeClaim a-",
        "exceeded quota: small, requested: persistentvolumeclaims=1",
    ),
    "quota on Secrets": (
        lambda cluster, ns: quota(cluster, ns, {"count/secrets": "0"}),
        "QuotaExceeded",
        "Secret a-token",
        "exceeded quota: small, requested: count/secrets=1",
    ),
    "limit on claims": (
        lambda cluster, ns: obstacle(cluster, limit_range("PersistentVolumeClaim", storage="1Mi"), namespace=ns),
        "LimitRangeViolated",
        "PersistentVolumeClaim a-",
        "maximum storage usage per PersistentVolumeClaim is 1Mi, but request is",
    ),
    "policy on Deployments": (
        lambda cluster, ns: policy(cluster, ns, "apps", "deployments", "not on Mondays"),
        "AdmissionDenied",
        "Deployment a-actor",
        "denied request: not on Mondays",
    ),
    "webhook that is down": (
        lambda cluster, ns: obstacle(cluster, dead_webhook(ns, "apps", "statefulsets")),
        "WebhookUnavailable",
        "StatefulSet a-coordinator",
        'failed calling webhook "dead.example.org"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_child_is_told_in_the_servers_words_and_made_when_it_may(
    cluster: Cluster, jobs: Jobs, told: Told, case: str
) -> None:
    hinder, reason, child, words = REFUSED[case]
    with hinder(cluster, jobs.namespace) as hindrance:
        in_effect(cluster, jobs.namespace, case)
        create(jobs)
        status = told.is_waiting(reason, child, words)
        created = condition(status, "ResourcesCreated")
        assert created is not None and (created["status"], created["reason"]) == ("False", reason)
        assert status["phase"] == "Pending"
        event = told.one_warning(reason)
        assert words in event["message"]
        hindrance.remove()
        status = jobs.wait_phase("a", "Running", deadline_s=RUNS_S)
    ready = jobs.eventually("it is ready", lambda: (r := jobs.condition("a", "Ready")) and r["status"] == "True" and r)
    assert ready["reason"] == "Running"
    assert [one for one in ("Reconciling", "Stalled") if jobs.condition("a", one)] == []
    assert len(told.warnings()) == 1


def in_effect(cluster: Cluster, namespace: str, case: str) -> None:
    """Admission learns of policies and webhooks by a watch of its own: wait until it has."""
    if case.startswith(("policy", "webhook")):
        kind, where = ("Deployment", {}) if case.startswith("policy") else ("StatefulSet", {"serviceName": "x"})
        labels = {"matchLabels": {"x": "y"}}
        template = {"metadata": {"labels": {"x": "y"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        spec = {"replicas": 0, "selector": labels, "template": template, **where}
        probe = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "probe"}, "spec": spec}

        def refused() -> bool:
            try:
                cluster.kubectl.create([probe], "-n", namespace, "--dry-run=server")
            except Exception as error:
                return "denied" in str(error) or "failed calling" in str(error)
            return False

        eventually(f"{case} is in effect", refused)


def test_tries_at_a_refused_child_come_less_and_less_often_while_other_jobs_are_served(
    cluster: Cluster, jobs: Jobs, told: Told, everywhere: OperatorProcess
) -> None:
    with cluster.namespace() as other, quota(cluster, jobs.namespace, {"count/jobsets.jobset.x-k8s.io": "0"}):
        since = cluster.audit.position()
        create(jobs)
        told.is_waiting("QuotaExceeded", "JobSet a-t", "count/jobsets.jobset.x-k8s.io=1")
        began = time.monotonic()
        neighbours = Jobs(cluster.kubectl, other)
        neighbours.create(job("good"))
        neighbours.wait_phase("good", "Running")
        told.one_warning("QuotaExceeded")
        # Not a wait for something to happen: over 20 s there is a bound for what may.
        time.sleep(max(0.0, 20.0 - (time.monotonic() - began)))
        called = calls(cluster, since, everywhere.user, jobs.namespace)
        assert 3 <= called["create", "jobsets"] <= 6  # after 0, 1, 3, 7 and 15 s
        assert called["patch", "rltrainingjobs/status"] <= 4
        assert len(told.warnings()) == 1
        # Whoever cannot train has no use for servers: they would hold GPUs.
        assert [pod["metadata"]["labels"]["inflight.dev/role"] for pod in jobs.pods("a")] == ["coordinator"]


@pytest.mark.parametrize("role", ["", "coordinator", "trainer", "inference", "actors"])
def test_an_overlay_that_the_server_refuses_stalls_the_job_until_it_is_mended(
    jobs: Jobs, told: Told, role: str
) -> None:
    spoilt = {"podTemplate": {"spec": {"noSuchField": True}}}
    create(jobs, **{role: spoilt} if role else {"actors": {"podTemplate": {"spec": {"dnsPolicy": "Whatever"}}}})
    status = told.reason("InvalidPodTemplate")
    stalled = condition(status, "Stalled")
    assert stalled is not None and stalled["reason"] == "InvalidPodTemplate", status
    assert condition(status, "Reconciling") is None
    assert ("noSuchField" if role else 'Unsupported value: "Whatever"') in stalled["message"]
    assert "suspend the job and mend" in stalled["message"]
    told.one_warning("InvalidPodTemplate")
    jobs.patch("a", {"suspend": True})
    jobs.wait_phase("a", "Suspended")
    jobs.patch("a", {"suspend": False, role or "actors": {"podTemplate": None}})
    jobs.wait_phase("a", "Running")
    assert jobs.condition("a", "Stalled") is None


# --- names that are taken ---------------------------------------------------------------------------------------------

POD = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
NEVER = {"spec": {**POD["spec"], "restartPolicy": "Never"}}
LABELLED = {"selector": {"matchLabels": {"x": "y"}}, "template": {**POD, "metadata": {"labels": {"x": "y"}}}}
FOREIGN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "account": ("v1", "ServiceAccount", {}),
    "token": ("v1", "Secret", {"stringData": {"token": "somebody-else's"}}),
    "from-run": ("networking.k8s.io/v1", "NetworkPolicy", {"spec": {"podSelector": {}}}),
    "actor": ("policy/v1", "PodDisruptionBudget", {"spec": {"maxUnavailable": 2, "selector": {}}}),
    "coordinator": (
        "v1",
        "PersistentVolumeClaim",
        {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}},
    ),
    "inference": ("v1", "Service", {"spec": {"ports": [{"port": 1}]}}),
    "inference-": ("apps/v1", "StatefulSet", {"spec": {"replicas": 0, "serviceName": "x", **LABELLED}}),
    "actor-": ("apps/v1", "Deployment", {"spec": {"replicas": 0, **LABELLED}}),
    "t": (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {
            "spec": {
                "suspend": True,
                "replicatedJobs": [{"name": "w", "template": {"spec": {"template": NEVER}}}],
            }
        },
    ),
}
"""A foreign object for each kind of child, by the suffix of its name (a dash at the end only tells two apart)."""


def test_a_foreign_object_of_a_childs_name_is_left_as_it_is(
    cluster: Cluster, jobs: Jobs, everywhere: OperatorProcess
) -> None:
    documents, names = [], {}
    for number, (suffix, (api_version, kind, fields)) in enumerate(FOREIGN.items()):
        names[kind] = f"j{number}", f"j{number}-{suffix.rstrip('-')}"
        metadata: dict[str, Any] = {"name": names[kind][1], "labels": {"inflight.dev/job": f"j{number}"}}
        documents.append({"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields})
    cluster.kubectl.create(documents, "-n", jobs.namespace)
    before = {kind: written(cluster, jobs.namespace, kind, name) for kind, (_, name) in names.items()}
    since = cluster.audit.position()
    jobs.create(*(job(owner) for owner, _ in names.values()), job("good"))
    for owner, name in names.values():
        status = Told(jobs, owner).is_waiting("NameTaken", f"{name} exists already", "delete it")
        assert status["phase"] == "Pending"
        Told(jobs, owner).one_warning("NameTaken")
    jobs.wait_phase("good", "Running")

    assert {kind: written(cluster, jobs.namespace, kind, name) for kind, (_, name) in names.items()} == before
    writes = [event for event in cluster.audit.events(since) if event.user == everywhere.user and event.is_write]
    touched = [(event.verb, event.resource, event.name) for event in writes if event.verb != "create"]
    ours = {(resource, names[kind][1]) for resource, kind in FOREIGN_RESOURCES.items()}
    assert [one for one in touched if one[1:] in ours] == []

    for kind, (_, name) in names.items():
        cluster.kubectl("delete", kind, name, "-n", jobs.namespace, "--wait=false")
    for owner, _ in names.values():
        jobs.wait_phase(owner, "Running", deadline_s=RUNS_S)


FOREIGN_RESOURCES = {
    "serviceaccounts": "ServiceAccount",
    "secrets": "Secret",
    "networkpolicies": "NetworkPolicy",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "services": "Service",
    "statefulsets": "StatefulSet",
    "deployments": "Deployment",
    "jobsets": "JobSet",
}


def written(cluster: Cluster, namespace: str, kind: str, name: str) -> dict[str, Any]:
    """All of an object but what its own controllers write."""
    found: dict[str, Any] = cluster.kubectl.get(kind, name, "-n", namespace)
    metadata = found["metadata"]
    managers = {one["manager"] for one in metadata.pop("managedFields", [])}
    assert "inflight-operator" not in managers
    for volatile in ("resourceVersion", "generation", "annotations", "finalizers"):
        metadata.pop(volatile, None)
    found.pop("status", None)
    if kind == "PersistentVolumeClaim":
        found["spec"].pop("volumeName", None)
    return found


# --- pods that are not made, or do not start --------------------------------------------------------------------------


def huge_node(gpus: int) -> dict[str, Any]:
    """A fake node with GPUs enough."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "250", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "huge", "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"capacity": resources, "allocatable": resources},
    }


PRIORITY = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "late"},
    "value": 10,
}
CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "late"},
    "provisioner": "kubernetes.io/host-path",
}
CODE = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}, "data": {"module.py": "x = 1\n"}}
CLAIM_OF_LATE_CLASS = {"storage": {"size": "1Gi", "class": "late", "accessModes": ["ReadWriteOnce"]}}
MISSING: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "priority class": (
        PRIORITY,
        {"scheduling": {"priorityClassName": "late"}},
        "PriorityClassMissing",
        "no PriorityClass with name late was found",
    ),
    "storage class": (
        CLASS,
        {"checkpoint": CLAIM_OF_LATE_CLASS},
        "ClaimPending",
        'storageclass.storage.k8s.io "late" not found',
    ),
    "environment": (
        CODE,
        {"environment": {"configMap": "late"}},
        "ConfigMapNotFound",
        "spec.environment.configMap: there is no ConfigMap late",
    ),
    "GPUs": (
        huge_node(1000),
        {"inference": {"replicas": 1, "resources": {"limits": {"nvidia.com/gpu": "1000"}}}},
        "Unschedulable",
        "Insufficient nvidia.com/gpu",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named_and_a_job_runs_once_it_is_there(
    cluster: Cluster, jobs: Jobs, told: Told, case: str
) -> None:
    document, spec, reason, words = MISSING[case]
    create(jobs, **spec)
    told.is_waiting(reason, words)
    told.one_warning(reason)
    with obstacle(cluster, document, namespace=jobs.namespace):
        jobs.wait_phase("a", "Running", deadline_s=RUNS_S)
        jobs.kubectl("delete", "rltj", "a", "-n", jobs.namespace)
        jobs.eventually("its pods are gone", lambda: not jobs.pods("a"))
    assert len(told.warnings()) == 1


PODS: dict[str, tuple[Hindrance, str, str]] = {
    "quota on CPUs": (
        lambda cluster, ns: quota(cluster, ns, {"requests.cpu": "1m"}),
        "QuotaExceeded",
        "exceeded quota: small, requested: requests.cpu=",
    ),
    "limit on containers": (
        lambda cluster, ns: obstacle(cluster, limit_range("Container", cpu="1m"), namespace=ns),
        "LimitRangeViolated",
        "maximum cpu usage per Container is 1m",
    ),
    "policy on pods": (
        lambda cluster, ns: policy(cluster, ns, "", "pods", "no pods today"),
        "AdmissionDenied",
        "denied request: no pods today",
    ),
}


@pytest.mark.parametrize("case", PODS)
def test_pods_that_cannot_be_made_are_told_of_from_the_events_of_their_controllers(
    cluster: Cluster, jobs: Jobs, told: Told, case: str, everywhere: OperatorProcess
) -> None:
    hinder, reason, words = PODS[case]
    with hinder(cluster, jobs.namespace) as hindrance:
        since = cluster.audit.position()
        create(jobs)
        status = told.is_waiting(reason, words)
        assert status["phase"] == "Starting"

        def every_role() -> bool:
            status = jobs.status("a")
            found = [condition(status, kind) for kind in ("InferenceReady", "ActorsReady", "TrainerRunning")]
            return all(one is not None and one["reason"] == reason and words in one["message"] for one in found)

        eventually("every role says so", every_role)
        told.one_warning(reason)
        assert calls(cluster, since, everywhere.user, jobs.namespace)["list", "pods"] <= 6
        hindrance.remove()
        jobs.wait_phase("a", "Running", deadline_s=60)
    assert len(told.warnings()) == 1


def test_a_pod_that_breaks_the_namespaces_pod_security_is_told_of(cluster: Cluster, jobs: Jobs, told: Told) -> None:
    label = "pod-security.kubernetes.io/enforce"
    cluster.kubectl("label", "namespace", jobs.namespace, f"{label}=restricted")
    create(jobs, actors={"podTemplate": {"spec": {"hostNetwork": True}}})
    told.is_waiting("PodSecurityViolated", 'violates PodSecurity "restricted', "hostNetwork")
    inference = jobs.condition("a", "InferenceReady")
    assert inference is not None and inference["status"] == "True"  # what we build ourselves is restricted enough
    told.one_warning("PodSecurityViolated")
    cluster.kubectl("label", "namespace", jobs.namespace, f"{label}-")
    jobs.wait_phase("a", "Running", deadline_s=RUNS_S)


def test_a_jobset_whose_jobs_are_refused_is_told_of(jobs: Jobs, told: Told) -> None:
    # JobSet's own schema takes it; the Job that it makes is refused.
    create(jobs, trainer={"podTemplate": {"spec": {"dnsPolicy": "Whatever"}}})
    told.is_waiting("InvalidPodTemplate", 'Unsupported value: "Whatever"')
    told.one_warning("InvalidPodTemplate")


def test_an_image_that_cannot_be_pulled_is_told_of(cluster: Cluster, jobs: Jobs, told: Told) -> None:
    # On a node that kwok does not play: there is no kubelet, so the test says what one would.
    create(jobs, actors={"podTemplate": {"spec": {"nodeName": "nowhere"}}})
    pod = eventually("the actor's pod", lambda: jobs.pods("a", "actor"))[0]["metadata"]["name"]
    words = 'Back-off pulling image "example.org/none:1"'
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": words}}
    state = {"name": "actor", "image": "example.org/none:1", "imageID": "", "ready": False, "restartCount": 0}
    patch = {"status": {"containerStatuses": [{**state, "state": waiting}]}}
    patched(cluster.kubectl, f"pod/{pod}", jobs.namespace, patch, "--subresource=status")
    told.is_waiting("ImagePullFailed", f"pod {pod} cannot have image example.org/none:1", words)
    told.one_warning("ImagePullFailed")
    started = {"ready": True, "started": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    patch = {"status": {"phase": "Running", "conditions": conditions, "containerStatuses": [state | started]}}
    patched(cluster.kubectl, f"pod/{pod}", jobs.namespace, patch, "--subresource=status")
    jobs.wait_phase("a", "Running")


# --- rights -----------------------------------------------------------------------------------------------------------


def role_without(directory: Path, resource: str, missing: str) -> Path:
    """The shipped ClusterRole without a verb on a resource."""
    rules = []
    for document in yaml.safe_load_all(CLUSTER_ROLE.read_text()):
        for rule in document["rules"]:
            others = [one for one in rule["resources"] if one != resource]
            if others:
                rules.append({**rule, "resources": others})
            if resource in rule["resources"]:
                kept = [verb for verb in rule["verbs"] if verb != missing]
                rules.append({**rule, "resources": [resource], "verbs": kept})
        document["rules"] = [rule for rule in rules if rule["verbs"]]
        file = directory / "role.yaml"
        file.write_text(yaml.safe_dump(document))
    return file


@contextlib.contextmanager
def operator_without(
    cluster: Cluster, namespace: str, directory: Path, resource: str, verb: str
) -> Iterator[Callable[[], None]]:
    """An operator that lacks rights; calling what is given grants them."""
    with operator_for(cluster, namespace, directory, role=role_without(directory, resource, verb)) as process:
        process.start()
        process.wait_watching()
        kubeconfig = process._environment["KUBECONFIG"]
        role = Path(kubeconfig).stem
        whole = next(yaml.safe_load_all(CLUSTER_ROLE.read_text()))["rules"]
        yield lambda: patched(cluster.kubectl, f"clusterrole/{role}", namespace, {"rules": whole})
        assert process.running()
        assert "Traceback" not in process.log


@pytest.fixture
def alone(cluster: Cluster, everywhere: OperatorProcess) -> Iterator[None]:
    """The module's operator keeps out of it."""
    everywhere.pause()
    yield
    everywhere.go_on()


@pytest.mark.usefixtures("alone")
def test_a_missing_right_to_create_is_told_and_used_once_it_is_granted(
    cluster: Cluster, jobs: Jobs, told: Told, tmp_path: Path
) -> None:
    with operator_without(cluster, jobs.namespace, tmp_path, "statefulsets", "create") as grant:
        create(jobs)
        told.is_waiting("PermissionDenied", 'cannot create resource "statefulsets"', "apply manifests/ again")
        told.one_warning("PermissionDenied")
        grant()
        jobs.wait_phase("a", "Running", deadline_s=RUNS_S)


@pytest.mark.usefixtures("alone")
def test_a_missing_right_to_look_at_pods_does_not_keep_the_status_from_being_told(
    cluster: Cluster, jobs: Jobs, told: Told, tmp_path: Path
) -> None:
    with operator_without(cluster, jobs.namespace, tmp_path, "pods", "list"):
        create(jobs, inference={"resources": {"limits": {"nvidia.com/gpu": "1000"}}})
        told.is_waiting("PermissionDenied", 'cannot list resource "pods"')


@pytest.mark.usefixtures("alone")
def test_a_missing_right_to_stop_is_told_while_the_job_is_being_suspended(
    cluster: Cluster, jobs: Jobs, told: Told, tmp_path: Path
) -> None:
    with operator_without(cluster, jobs.namespace, tmp_path, "deployments", "patch") as grant:
        create(jobs)
        jobs.wait_phase("a", "Running")
        jobs.patch("a", {"suspend": True})
        status = told.is_waiting("PermissionDenied", 'cannot patch resource "deployments"')
        assert status["phase"] == "Suspending"
        told.one_warning("PermissionDenied")
        grant()
        jobs.wait_phase("a", "Suspended", deadline_s=RUNS_S)


# --- namespaces -------------------------------------------------------------------------------------------------------


def all_trainers(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """The trainers' pods of all jobs of a namespace."""
    found: list[dict[str, Any]] = cluster.kubectl.get("pods", "-n", namespace, "-l", "inflight.dev/role=trainer")[
        "items"
    ]
    return found


def test_a_namespace_with_jobs_can_be_deleted_at_any_moment(cluster: Cluster, everywhere: OperatorProcess) -> None:
    with cluster.namespace() as doomed:
        since = cluster.audit.position()
        jobs = Jobs(cluster.kubectl, doomed)
        jobs.create(*(job(f"j{number}") for number in range(4)))
        jobs.wait_phase("j0", "Pending", "Starting", "Running")
        cluster.kubectl("delete", "namespace", doomed, "--wait=false")
        for pod in all_trainers(cluster, doomed):
            # What a kubelet would do: no Job lets go of a trainer's pod that has not ended.
            with contextlib.suppress(KubectlError):
                ended = {"status": {"phase": "Failed"}}
                patched(cluster.kubectl, f"pod/{pod['metadata']['name']}", doomed, ended, "--subresource=status")
        eventually("it is gone", lambda: not cluster.kubectl("get", "ns", doomed, "--ignore-not-found"), 60)
        assert calls(cluster, since, everywhere.user, doomed).total() < 400
