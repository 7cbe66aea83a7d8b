"""The command line and configuration of each component of a real node, beside those of the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.cluster.components import ADMINS, HOST, USERS, Components
from inflight_runtime.local.ports import PortPool

from . import network
from .machine import CNI_PLUGINS

NODE_NAME = "node"
DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/inflight-pause:1"
PODS_PLUGIN = "io.containerd.grpc.v1.cri"
"""The half of containerd that the kubelet talks to."""


@dataclass(frozen=True)
class NodePorts:
    """The ports of one node's components."""

    kubelet: int
    dns: int
    dns_ready: int
    proxy_health: int
    proxy_metrics: int

    @classmethod
    def choose(cls, pool: PortPool) -> NodePorts:
        """Free ports, none twice."""
        return cls(pool.take(), pool.take(), pool.take(), pool.take(), pool.take())


class NodeComponents(Components):
    """A control plane that pods can reach, containerd, kubelet, kube-proxy and CoreDNS.

    Args:
        programs: path of each program.
        state: the cluster's state directory.
        store: where containerd keeps images.
    """

    api_host = network.NODE_ADDRESS
    users = USERS | {
        "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
        "kube-proxy": ("system:kube-proxy", None),
        "coredns": ("coredns", ADMINS),
    }

    def __init__(self, programs: Mapping[str, Path], state: Path, store: Path) -> None:
        super().__init__(programs, state)
        self._store = store
        self.node_ports = NodePorts.choose(self._pool)
        self.containerd_socket = state / "containerd.sock"

    def write_files(self) -> None:
        """Make everything that the control plane and the node read."""
        super().write_files()
        hosts = [NODE_NAME, network.NODE_ADDRESS]
        self.authority.issue(f"system:node:{NODE_NAME}", "system:nodes", hosts).write(self._pki, "kubelet-server")
        self.authority.issue("kube-apiserver-kubelet-client", ADMINS).write(self._pki, "kubelet-client")
        network.write_cni(self._state / "cni", self._state / "pod-addresses")
        containerd = self._containerd_configuration()
        (self._state / "containerd.toml").write_text(containerd)
        (self._state / "containerd-alone.toml").write_text(f'disabled_plugins = ["{PODS_PLUGIN}"]\n{containerd}')
        (self._state / "resolv.conf").touch()  # pods know no name server but the cluster's
        (self._state / "Corefile").write_text(self._corefile())
        self._write_yaml("kubelet.yaml", self._kubelet_configuration())
        self._write_yaml("kube-proxy.yaml", self._proxy_configuration())

    def apiserver(self) -> list[str]:
        """The API server, which can call the kubelet (logs, exec)."""
        return [
            *super().apiserver(),
            f"--kubelet-certificate-authority={self._pki / 'ca.crt'}",
            f"--kubelet-client-certificate={self._pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={self._pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def containerd(self, *, for_pods: bool = True) -> list[str]:
        """Containerd: Debian's, with everything of its own in the state directory and the store."""
        name = "containerd.toml" if for_pods else "containerd-alone.toml"
        return ["containerd", "--config", str(self._state / name)]

    def kubelet(self) -> list[str]:
        """The kubelet."""
        return [
            self._program("kubelet"),
            *(f"--config={self._state / 'kubelet.yaml'}", f"--kubeconfig={self.kubeconfig('kubelet')}"),
            *(f"--root-dir={self._state / 'kubelet'}", f"--cert-dir={self._state / 'kubelet-pki'}"),
            *(f"--node-ip={network.NODE_ADDRESS}", f"--hostname-override={NODE_NAME}"),
        ]

    def kube_proxy(self) -> list[str]:
        """Kube-proxy: Services, by netfilter rules."""
        return [self._program("kube-proxy"), f"--config={self._state / 'kube-proxy.yaml'}"]

    def coredns(self) -> list[str]:
        """CoreDNS: the names of Services and pods, and no others."""
        return [self._program("coredns"), "-conf", str(self._state / "Corefile")]

    def _containerd_configuration(self) -> str:
        return f"""\
version = 2
root = "{self._store}"
state = "{self._state}/containerd-run"

[grpc]
address = "{self.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{self._state}/opt"

[plugins."{PODS_PLUGIN}"]
sandbox_image = "{PAUSE_IMAGE}"
netns_mounts_under_state_dir = true
# Without CAP_SYS_RESOURCE, as in many virtual machines and containers, runc could not start a single sandbox.
restrict_oom_score_adj = true

[plugins."{PODS_PLUGIN}".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{self._state}/cni"
"""

    def _kubelet_configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": network.NODE_ADDRESS,
            "port": self.node_ports.kubelet,
            "healthzPort": 0,
            "containerRuntimeEndpoint": f"unix://{self.containerd_socket}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [network.DNS_ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": str(self._state / "resolv.conf"),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(self._pki / "kubelet-server.crt"),
            "tlsPrivateKeyFile": str(self._pki / "kubelet-server.key"),
            # A machine that does other things as well: only real need evicts a pod, and no image is collected.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": str(self._state / "pod-logs"),
            "volumePluginDir": str(self._state / "volume-plugins"),
            "makeIPTablesUtilChains": False,
        }

    def _proxy_configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(self.kubeconfig("kube-proxy"))},
            "clusterCIDR": network.POD_RANGE,
            "hostnameOverride": NODE_NAME,
            "healthzBindAddress": f"{HOST}:{self.node_ports.proxy_health}",
            "metricsBindAddress": f"{HOST}:{self.node_ports.proxy_metrics}",
            "nodePortAddresses": [f"{network.NODE_ADDRESS}/32"],
            # The machine's own settings stay.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "iptables": {"minSyncPeriod": "100ms", "localhostNodePorts": False},
        }

    def _corefile(self) -> str:
        return f"""\
.:{self.node_ports.dns} {{
  bind {network.NODE_ADDRESS}
  errors
  ready {HOST}:{self.node_ports.dns_ready}
  kubernetes {DOMAIN} in-addr.arpa {{
    kubeconfig {self.kubeconfig("coredns")}
    pods insecure
    ttl 1
  }}
  cache {{
    success 9984 1
    denial 9984 1
  }}
}}
"""
