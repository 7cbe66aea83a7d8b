"""The start of a control plane, step by step, for whatever plays its nodes."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import jobset
from .binaries import Binaries
from .components import Components
from .kubectl import Kubectl, KubectlError
from .processes import Processes
from .waiting import eventually

CRDS = Path(__file__).resolve().parents[3] / "crds"
UNCHECKED = "--validate=false"
"""Our own objects: before each one kubectl reads the whole schema of its kind, a tenth of a second of a core."""
API_DEADLINE_S = 90.0
READY_DEADLINE_S = 60.0


def start_api(components: Components, processes: Processes, state: Path) -> None:
    """Start etcd and the API server, and wait until it is ready."""
    processes.start("etcd", components.etcd())
    processes.start("kube-apiserver", components.apiserver())
    context = ssl.create_default_context(cafile=str(state / "pki" / "ca.crt"))

    def answers() -> bool:
        connection = http.client.HTTPSConnection(
            components.api_host, components.ports.apiserver, timeout=5, context=context
        )
        try:
            connection.request("GET", "/readyz")  # open to everybody once RBAC's own roles are there
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    processes.wait("the API server is ready", "kube-apiserver", answers, API_DEADLINE_S)


def create_objects(
    kubectl: Kubectl, components: Components, binaries: Binaries, objects: Iterable[Mapping[str, Any]]
) -> str:
    """Create what has to be there before the controllers; return what was said against this project's CRDs.

    The controller manager looks for new kinds only every 30 s: a CRD that it has not seen at its start leaves the
    children of deleted objects that long.
    """
    kubectl.create(jobset.custom_resources(binaries.jobset_crds), UNCHECKED)
    refused = ""
    try:
        kubectl("apply", "-f", str(CRDS))
    except KubectlError as error:
        refused = error.stderr
    certificate = components.authority.identity.certificate
    webhooks = jobset.webhooks(binaries.jobset_webhooks, components.ports.jobset_webhook, certificate)
    kubectl.create([*objects, *webhooks], UNCHECKED)
    # Not `kubectl wait`: it fails at once on a CRD that has no status yet.
    eventually("every CRD is established", lambda: _all_established(kubectl))
    return refused


def start_controllers(components: Components, processes: Processes) -> None:
    """Start the controller manager, the scheduler and JobSet."""
    processes.start("kube-controller-manager", components.controller_manager())
    processes.start("kube-scheduler", components.scheduler())
    processes.start("jobset", *components.jobset())


def wait_ready(kubectl: Kubectl, processes: Processes, nodes: int, played_by: str) -> None:
    """Wait until pods can be created and run, on so many nodes that a component plays."""

    def accounts() -> bool:
        return exists(kubectl, "sa/default", "default")

    def webhooks() -> bool:
        try:
            kubectl.create([jobset.PROBE], "--dry-run=server", UNCHECKED)
        except KubectlError:
            return False
        return True

    def ready() -> bool:
        conditions = kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")
        return conditions.split() == ["True"] * nodes

    processes.wait("service accounts are made", "kube-controller-manager", accounts, READY_DEADLINE_S)
    processes.wait("the nodes are ready", played_by, ready, READY_DEADLINE_S)
    processes.wait("JobSet's webhooks answer", "jobset", webhooks, READY_DEADLINE_S)


def exists(kubectl: Kubectl, what: str, namespace: str) -> bool:
    """Whether ``kind/name`` is there."""
    return bool(kubectl("get", what, "-n", namespace, "--ignore-not-found", "-o", "name"))


def _all_established(kubectl: Kubectl) -> bool:
    crds = kubectl.get("crds")["items"]
    return all(
        any(c["type"] == "Established" and c["status"] == "True" for c in crd.get("status", {}).get("conditions", []))
        for crd in crds
    )
