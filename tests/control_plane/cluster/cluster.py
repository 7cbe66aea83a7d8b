"""A whole control plane on loopback: started in order, ended as one."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import access, jobset, nodes
from .audit import AuditLog
from .binaries import Binaries, ensure_binaries
from .components import HOST, Components
from .kubectl import Kubectl, KubectlError
from .processes import Processes
from .waiting import eventually

CRDS = Path(__file__).resolve().parents[3] / "crds"
NODES = 4
API_DEADLINE_S = 90.0
READY_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """A running control plane.

    Attributes:
        state: everything it writes; removed when it ends.
        kubeconfig: of a user who may do everything.
        kubectl: kubectl as that user.
        audit: the audit log.
        processes: its processes.
        refused_crds: what the API server said against this project's CRDs; empty when it took them. Then they are not
            there, and the tests that do not need them run all the same.
    """

    state: Path
    kubeconfig: Path
    kubectl: Kubectl
    audit: AuditLog
    processes: Processes
    refused_crds: str

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        """A fresh namespace in which pods can be created; deleted at the end (nobody waits for it to be gone)."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            eventually(f"the default service account of {name}", lambda: _exists(self.kubectl, "sa/default", name))
            yield name
        finally:
            # The jobs first: deleting a namespace deletes its pods first, and no kubelet ends a fake trainer's, which
            # its Job would wait for.
            if not self.refused_crds:
                self.kubectl("delete", "rltrainingjobs", "--all", "-n", name, "--ignore-not-found", "--wait=false")
            self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def service_account(self, role_file: Path, namespace: str) -> contextlib.AbstractContextManager[Path]:
        """A kubeconfig that may do exactly what the ClusterRole in ``role_file`` says; see :mod:`.access`."""
        return access.service_account(self.kubectl, role_file, namespace)


@contextlib.contextmanager
def running_cluster(binaries: Binaries | None = None) -> Iterator[Cluster]:
    """Start a control plane with JobSet, this project's CRDs and a few fake nodes; end it with everything it made.

    Raises:
        ClusterError: something cannot be built, or did not start in time; the message holds the end of its log.
    """
    binaries = binaries or ensure_binaries()
    # Resolved: the keeper removes exactly this path.
    state = Path(tempfile.mkdtemp(prefix="inflight-control-plane-")).resolve()
    processes = Processes(state)
    try:
        components = Components(binaries.programs, state)
        components.write_files()
        kubectl = Kubectl(binaries.programs["kubectl"], components.kubeconfig("admin"), state)
        _start_api(components, processes, state)
        refused_crds = _create_objects(kubectl, components, binaries)
        _start_controllers(components, processes, binaries)
        _wait_ready(kubectl, processes)
        yield Cluster(state, kubectl.kubeconfig, kubectl, AuditLog(state), processes, refused_crds)
    finally:
        processes.stop()


def _start_api(components: Components, processes: Processes, state: Path) -> None:
    processes.start("etcd", components.etcd())
    processes.start("kube-apiserver", components.apiserver())
    context = ssl.create_default_context(cafile=str(state / "pki" / "ca.crt"))

    def answers() -> bool:
        connection = http.client.HTTPSConnection(HOST, components.ports.apiserver, timeout=5, context=context)
        try:
            connection.request("GET", "/readyz")  # open to everybody once RBAC's own roles are there
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    processes.wait("the API server is ready", "kube-apiserver", answers, API_DEADLINE_S)


def _create_objects(kubectl: Kubectl, components: Components, binaries: Binaries) -> str:
    """Create what has to be there before the controllers; return what was said against this project's CRDs.

    The controller manager looks for new kinds only every 30 s: a CRD that it has not seen at its start leaves the
    children of deleted objects that long.
    """
    kubectl.create(jobset.custom_resources(binaries.jobset_crds))
    refused = ""
    try:
        kubectl("apply", "-f", str(CRDS))
    except KubectlError as error:
        refused = error.stderr
    kubectl.create(
        [
            nodes.STORAGE_CLASS,
            *nodes.fake_nodes(NODES),
            *jobset.webhooks(
                binaries.jobset_webhooks,
                components.ports.jobset_webhook,
                components.authority.identity.certificate,
            ),
        ]
    )
    # Not `kubectl wait`: it fails at once on a CRD that has no status yet.
    eventually("every CRD is established", lambda: _all_established(kubectl))
    return refused


def _start_controllers(components: Components, processes: Processes, binaries: Binaries) -> None:
    processes.start("kube-controller-manager", components.controller_manager())
    processes.start("kube-scheduler", components.scheduler())
    processes.start("jobset", *components.jobset())
    processes.start("kwok", components.kwok([*binaries.kwok_stages, nodes.EXIT_STAGE]))


def _wait_ready(kubectl: Kubectl, processes: Processes) -> None:
    def accounts() -> bool:
        return _exists(kubectl, "sa/default", "default")

    def webhooks() -> bool:
        try:
            kubectl.create([jobset.PROBE], "--dry-run=server")
        except KubectlError:
            return False
        return True

    def ready() -> bool:
        conditions = kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")
        return conditions.split() == ["True"] * NODES

    processes.wait("service accounts are made", "kube-controller-manager", accounts, READY_DEADLINE_S)
    processes.wait("the nodes are ready", "kwok", ready, READY_DEADLINE_S)
    processes.wait("JobSet's webhooks answer", "jobset", webhooks, READY_DEADLINE_S)


def _all_established(kubectl: Kubectl) -> bool:
    crds = kubectl.get("crds")["items"]
    return all(
        any(c["type"] == "Established" and c["status"] == "True" for c in crd.get("status", {}).get("conditions", []))
        for crd in crds
    )


def _exists(kubectl: Kubectl, what: str, namespace: str) -> bool:
    return bool(kubectl("get", what, "-n", namespace, "--ignore-not-found", "-o", "name"))
