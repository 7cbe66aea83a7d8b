"""A real Kubernetes control plane for tests, on loopback, compiled from source and thrown away at the end.

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and the JobSet controller with its webhooks are the real
ones; kwok plays the nodes, so that pods become ready, succeed and fail without any container. There are no networks, no
proxies and no kubelets: nothing outside the process's own directories and loopback ports is touched.
"""

from .audit import AuditEvent, AuditLog
from .binaries import ensure_binaries, ensure_program
from .cluster import Cluster, running_cluster
from .errors import ClusterError
from .kubectl import Kubectl, KubectlError
from .nodes import EXIT_CODE, MESSAGE, end_pods
from .waiting import eventually

__all__ = [
    "EXIT_CODE",
    "MESSAGE",
    "AuditEvent",
    "AuditLog",
    "Cluster",
    "ClusterError",
    "Kubectl",
    "KubectlError",
    "end_pods",
    "ensure_binaries",
    "ensure_program",
    "eventually",
    "running_cluster",
]
