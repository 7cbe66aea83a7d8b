"""A whole control plane on loopback with fake nodes: started in order, ended as one."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import access, nodes
from .audit import AuditLog
from .binaries import Binaries, ensure_binaries
from .components import Components
from .kubectl import Kubectl
from .processes import Processes
from .starting import create_objects, exists, start_api, start_controllers, wait_ready
from .waiting import eventually

NODES = 4


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
        leave_namespaces: jobs are deleted at a namespace's end, all else is left for the cluster's: the deletion of a
            namespace asks for objects of every kind there is, which is a third of all that tests ask for.
    """

    state: Path
    kubeconfig: Path
    kubectl: Kubectl
    audit: AuditLog
    processes: Processes
    refused_crds: str
    leave_namespaces: bool = False

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        """A fresh namespace in which pods can be created; deleted at the end, as a rule (nobody waits for that)."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        try:
            eventually(f"the default service account of {name}", lambda: exists(self.kubectl, "sa/default", name))
            yield name
        finally:
            # The jobs first: deleting a namespace deletes its pods first, and no kubelet ends a fake trainer's, which
            # its Job would wait for.
            if not self.refused_crds:
                self.kubectl("delete", "rltrainingjobs", "--all", "-n", name, "--ignore-not-found", "--wait=false")
            if not self.leave_namespaces:
                self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def service_account(self, role_file: Path, namespace: str) -> contextlib.AbstractContextManager[Path]:
        """A kubeconfig that may do exactly what the ClusterRole in ``role_file`` says; see :mod:`.access`."""
        return access.service_account(self.kubectl, role_file, namespace)


@contextlib.contextmanager
def running_cluster(binaries: Binaries | None = None, *, leave_namespaces: bool = False) -> Iterator[Cluster]:
    """Start a control plane with JobSet, this project's CRDs and a few fake nodes; end it with everything it made.

    Args:
        binaries: the programs; by default those of the cache, built when they are not there.
        leave_namespaces: see :class:`Cluster`.

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
        start_api(components, processes, state)
        objects = [nodes.STORAGE_CLASS, *nodes.fake_nodes(NODES)]
        refused_crds = create_objects(kubectl, components, binaries, objects)
        start_controllers(components, processes)
        processes.start("kwok", components.kwok([*binaries.kwok_stages, nodes.EXIT_STAGE]))
        wait_ready(kubectl, processes, NODES, "kwok")
        audit = AuditLog(state)
        yield Cluster(state, kubectl.kubeconfig, kubectl, audit, processes, refused_crds, leave_namespaces)
    finally:
        processes.stop()
