"""The test cluster itself: what the other tests here stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kubernetes import client

from control_plane.cluster import EXIT_CODE, MESSAGE, Cluster, Kubectl, KubectlError, end_pods, eventually
from control_plane.cluster.client import connect

TESTS = Path(__file__).resolve().parents[1]
CONFIG_MAP = client.V1ConfigMap(metadata=client.V1ObjectMeta(name="c"))


def jobset(name: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    template = {
        "metadata": {"annotations": annotations or {}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "none"}]},
    }
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": template}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [{"name": "n", "template": {"spec": job}}]},
    }


def condition(kubectl: Kubectl, namespace: str, what: str, wanted: str) -> dict[str, Any] | None:
    """A condition of an object, once it is true."""
    found = kubectl.get(what, "-n", namespace).get("status", {}).get("conditions", [])
    return next((c for c in found if c["type"] == wanted and c["status"] == "True"), None)


def claim(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def test_a_pod_with_gpu_and_volume_runs_on_a_fake_node(
    cluster: Cluster, admin: client.ApiClient, namespace: str
) -> None:
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {"containers": [container], "volumes": [volume]},
    }
    cluster.kubectl.create([claim("data", namespace), pod])

    def running() -> client.V1PodStatus | None:
        status = client.CoreV1Api(admin).read_namespaced_pod("p", namespace).status
        return status if status is not None and status.phase == "Running" else None

    conditions = eventually("the pod runs", running).conditions or []
    assert [one.status for one in conditions if one.type == "Ready"] == ["True"]
    assert cluster.kubectl.get("pod/p", "-n", namespace)["spec"]["nodeName"].startswith("fake-")


def test_a_jobset_passes_its_webhooks_and_completes(cluster: Cluster, namespace: str) -> None:
    kubectl = cluster.kubectl
    kubectl.create([jobset("js")], "-n", namespace)
    spec = kubectl.get("jobset/js", "-n", namespace)["spec"]
    # Nobody but the mutating webhook fills these in.
    assert spec["replicatedJobs"][0]["template"]["spec"]["completionMode"] == "Indexed"
    assert spec["network"]["enableDNSHostnames"] is True

    def both_running() -> bool:
        pods = kubectl.get("pods", "-n", namespace)["items"]
        return [p["status"]["phase"] for p in pods] == ["Running", "Running"]

    eventually("both pods run", both_running)
    end_pods(kubectl, namespace, "jobset.sigs.k8s.io/jobset-name=js")
    eventually("the JobSet completes", lambda: condition(kubectl, namespace, "jobset/js", "Completed"))


def test_a_jobset_fails_when_its_pods_do(cluster: Cluster, namespace: str) -> None:
    annotations = {EXIT_CODE: "137", MESSAGE: "out of memory"}
    cluster.kubectl.create([jobset("js", annotations)], "-n", namespace)
    eventually("the JobSet fails", lambda: condition(cluster.kubectl, namespace, "jobset/js", "Failed"))
    pods = cluster.kubectl.get("pods", "-n", namespace)["items"]
    failed = next(p for p in pods if p["status"]["phase"] == "Failed")  # the other one may have been deleted first
    ended = failed["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (137, "out of memory")


def test_a_jobset_whose_pod_names_would_be_too_long_is_refused(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(KubectlError, match=r"vjobset.* denied the request.*JobSet name is too long"):
        cluster.kubectl.create([jobset("x" * 60)], "-n", namespace)


def test_deleting_an_owner_deletes_its_children_at_once(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl.create([jobset("js")], "-n", namespace)
    eventually("the Job is there", lambda: cluster.kubectl.get("jobs", "-n", namespace)["items"])
    cluster.kubectl("delete", "jobset/js", "-n", namespace, "--wait=false")
    # The garbage collector looks for new kinds every 30 s only: it must have seen JobSet when it started.
    eventually("everything is gone", lambda: not cluster.kubectl.get("jobs,pods", "-n", namespace)["items"], 15)


def test_the_audit_log_shows_who_did_what(cluster: Cluster, admin: client.ApiClient, namespace: str) -> None:
    before = cluster.audit.position()
    client.CoreV1Api(admin).create_namespaced_config_map(namespace, CONFIG_MAP)
    (event,) = [event for event in cluster.audit.events(before) if event.namespace == namespace and event.name == "c"]
    assert (event.verb, event.resource, event.user, event.code) == ("create", "configmaps", "admin", 201)
    assert event.is_write


def test_a_service_account_may_do_what_its_role_says_and_nothing_else(
    cluster: Cluster, namespace: str, kubeconfig_for: Callable[[Path], Path], tmp_path: Path
) -> None:
    role = tmp_path / "role.yaml"
    role.write_text(
        "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: reader}\n"
        "rules: [{apiGroups: [''], resources: [configmaps], verbs: [list]}]\n"
    )
    before = cluster.audit.position()
    with connect(kubeconfig_for(role)) as connected:
        core = client.CoreV1Api(connected)
        core.list_config_map_for_all_namespaces()
        with pytest.raises(client.ApiException) as refused:
            core.create_namespaced_config_map(namespace, CONFIG_MAP)
    assert refused.value.status == 403
    account = f"system:serviceaccount:{namespace}:"
    codes = [(event.verb, event.code) for event in cluster.audit.events(before) if event.user.startswith(account)]
    assert codes == [("list", 200), ("create", 403)]


@pytest.fixture
def second_cluster() -> Iterator[subprocess.Popen[str]]:
    """``make control-plane`` as a process, up."""
    command = [sys.executable, "-m", "control_plane.cluster"]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "crash"])
@pytest.mark.timeout(180, func_only=True)
def test_nothing_is_left(cluster: Cluster, second_cluster: subprocess.Popen[str], signum: signal.Signals) -> None:
    assert second_cluster.stdout is not None
    told: list[str] = []
    while not told or not told[-1].startswith("Ctrl-C"):
        line = second_cluster.stdout.readline()
        assert line, f"it ended after saying {told}"
        told.append(line.strip())
    kubeconfig = Path(next(line.partition("KUBECONFIG=")[2] for line in told if "KUBECONFIG=" in line))
    state = kubeconfig.parents[1]
    directory = provision(cluster.kubectl.acting_as(kubeconfig))
    family = psutil.Process(second_cluster.pid).children(recursive=True)
    assert len(family) == 7  # six components and the keeper
    assert state.is_dir()
    assert directory.is_dir()

    second_cluster.send_signal(signum)

    eventually("every process is gone", lambda: not [process for process in family if alive(process)])
    eventually("the state directory is gone", lambda: not state.exists())
    assert not directory.exists()
    assert second_cluster.wait(30) == (0 if signum == signal.SIGINT else -signum)


def provision(kubectl: Kubectl) -> Path:
    """Let the controller manager make a volume; return the directory it has made for it."""
    kubectl.create([claim("c", "default")])
    volumes = eventually("a volume is made", lambda: kubectl.get("pv")["items"])
    return Path(volumes[0]["spec"]["hostPath"]["path"])


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
