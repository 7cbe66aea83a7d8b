"""A whole cluster of one real node: started in order, ended as one."""

from __future__ import annotations

import contextlib
import http.client
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from control_plane.cluster import AuditLog, Cluster, Kubectl, ensure_binaries
from control_plane.cluster.binaries import REAL_NODE, Binaries, cache_directory
from control_plane.cluster.components import HOST
from control_plane.cluster.processes import Processes
from control_plane.cluster.starting import create_objects, start_api, start_controllers, wait_ready

from . import machine, network, objects
from .components import NODE_NAME, NodeComponents
from .images import Images

READY_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Node(Cluster):
    """A running cluster of one node, this machine.

    Attributes:
        images: the images that its pods can use.
        name: the node's name.
    """

    images: Images
    name: str = NODE_NAME

    def import_image(self, archive: Path) -> None:
        """Let pods use the images of a docker or OCI archive, under the names that it gives them."""
        self.images.add(archive)


@contextlib.contextmanager
def running_node(binaries: Binaries | None = None) -> Iterator[Node]:
    """Make this machine a Kubernetes node with JobSet and this project's CRDs; end it with everything it made.

    Needs root, and Debian's containerd (installed when it is missing). Only one at a time: a second one waits.

    Raises:
        ClusterError: something is missing, cannot be built, or did not start in time; the message says what.
    """
    machine.check()
    binaries = binaries or ensure_binaries(REAL_NODE)
    with machine.claimed() as lock:
        # Resolved: the keeper removes exactly this path.
        state = Path(tempfile.mkdtemp(prefix="inflight-node-")).resolve()
        store = cache_directory() / "containerd"
        processes = Processes(state, held=[lock.fileno()])
        try:
            machine.record(state, lock, mounts_below=[store])
            processes.at_end(machine.teardown_command(state))
            network.set_up()
            components = NodeComponents(binaries.programs, state, store)
            components.write_files()
            images = Images(components.containerd_socket)
            kubectl = Kubectl(binaries.programs["kubectl"], components.kubeconfig("admin"), state)
            _start_containerd(components, processes, images)
            start_api(components, processes, state)
            given = [
                *objects.name_server(components.node_ports.dns),
                objects.storage_class(),
                *objects.volume_pool(state / "volumes"),
            ]
            refused_crds = create_objects(kubectl, components, binaries, given)
            start_controllers(components, processes)
            _start_node(components, processes, images, binaries.programs["pause"])
            wait_ready(kubectl, processes, 1, "kubelet")
            _wait_for_names(components, processes)
            yield Node(state, kubectl.kubeconfig, kubectl, AuditLog(state), processes, refused_crds, images=images)
        finally:
            processes.stop()


def _start_containerd(components: NodeComponents, processes: Processes, images: Images) -> None:
    """Start containerd without what an earlier node has left in its store: its pods would be taken for this one's."""
    processes.start("containerd-alone", components.containerd(for_pods=False))
    processes.wait("containerd answers", "containerd-alone", images.answers, READY_DEADLINE_S)
    images.forget_containers()
    processes.end("containerd-alone")
    processes.start("containerd", components.containerd())


def _start_node(components: NodeComponents, processes: Processes, images: Images, pause: Path) -> None:
    processes.start("kube-proxy", components.kube_proxy())
    processes.start("coredns", components.coredns())
    processes.wait("containerd answers", "containerd", images.answers, READY_DEADLINE_S)
    images.add_pause(pause, components.containerd_socket.parent)
    processes.start("kubelet", components.kubelet())


def _wait_for_names(components: NodeComponents, processes: Processes) -> None:
    def answers() -> bool:
        connection = http.client.HTTPConnection(HOST, components.node_ports.dns_ready, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    processes.wait("names are answered", "coredns", answers, READY_DEADLINE_S)
