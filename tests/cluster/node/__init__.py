"""A real Kubernetes cluster of one node for tests: the control plane of ``control_plane.cluster``, and this machine.

Containerd and runc run the pods, the kubelet looks after them, kube-proxy makes their Services and CoreDNS their names:
all real, compiled from source or from Debian's packages. It needs root. No address of it can be reached from outside,
and nothing of it can reach outside; at its end no process, mount, interface, rule or cgroup is left.
"""

from .node import Node, running_node

__all__ = ["Node", "running_node"]
