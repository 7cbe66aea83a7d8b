"""The command line of each component of a control plane. Everything listens on loopback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inflight_runtime.local.ports import PortPool

from .audit import POLICY
from .certificates import Authority, new_key, private_pem, public_pem, write_kubeconfig
from .keeper import AUDIT_LOG

HOST = "127.0.0.1"
ADVERTISED = "198.51.100.1"
"""The API server insists on an address that is not loopback. This one is for documentation: no host has it. Here no
interface does either, and nobody connects to it; a real node puts it on its loopback interface."""
SERVICE_RANGE = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
"""What the API server gives to its own Service."""
POD_RANGE = "10.245.0.0/16"
FAKE_NODE = "kwok.x-k8s.io/node=fake"
# The default of 20 requests a second makes the controllers the slowest part of every test.
CLIENT_LIMITS = ["--kube-api-qps=300", "--kube-api-burst=600"]
ADMINS = "system:masters"
USERS = {
    "admin": ("admin", ADMINS),
    "controller-manager": ("system:kube-controller-manager", None),
    "scheduler": ("system:kube-scheduler", None),
    "jobset": ("jobset-controller", ADMINS),
    "kwok": ("kwok", ADMINS),
}
"""Who connects as whom: each has a name of its own, so that the audit log tells them apart."""


@dataclass(frozen=True)
class Ports:
    """The ports of one cluster."""

    etcd: int
    etcd_peer: int
    apiserver: int
    jobset_webhook: int
    kwok: int

    @classmethod
    def choose(cls, pool: PortPool) -> Ports:
        """Free ports, none twice."""
        return cls(pool.take(), pool.take(), pool.take(), pool.take(), pool.take())


class Components:
    """Writes what the components read, and knows how each is started.

    Args:
        programs: path of each program.
        state: the cluster's state directory.
    """

    api_host = HOST
    """Where the API server listens."""
    users: Mapping[str, tuple[str, str | None]] = USERS
    """Whom a kubeconfig is written for."""

    def __init__(self, programs: Mapping[str, Path], state: Path) -> None:
        self._programs = programs
        self._state = state
        self._pki = state / "pki"
        self._pool = PortPool(HOST)
        self.ports = Ports.choose(self._pool)
        self.server = f"https://{self.api_host}:{self.ports.apiserver}"
        self.authority = Authority()

    def kubeconfig(self, user: str) -> Path:
        """The kubeconfig of one of :attr:`users`."""
        return self._pki / f"{user}.kubeconfig"

    def write_files(self) -> None:
        """Make the certificates, the kubeconfigs and the configuration files."""
        self._pki.mkdir()
        authority = self.authority.identity
        authority.write(self._pki, "ca")
        names = ["localhost", "kubernetes.default.svc", HOST, self.api_host, FIRST_SERVICE]
        serving = self.authority.issue("kube-apiserver", hosts=names)
        serving.write(self._pki, "apiserver")
        key = new_key()
        (self._pki / "service-accounts.pub").write_bytes(public_pem(key))
        (self._pki / "service-accounts.key").write_bytes(private_pem(key))
        for user, (name, group) in self.users.items():
            identity = self.authority.issue(name, group)
            write_kubeconfig(self.kubeconfig(user), self.server, authority.certificate, identity)
        self._write_yaml("audit-policy.yaml", POLICY)
        webhook_certificates = self._state / "jobset-certificates"
        webhook_certificates.mkdir()
        serving.write(webhook_certificates, "tls")
        self._write_yaml("jobset.yaml", self._jobset_configuration(webhook_certificates))

    def etcd(self) -> list[str]:
        """Etcd, without fsync: its data goes with the cluster."""
        client, peer = (f"http://{HOST}:{port}" for port in (self.ports.etcd, self.ports.etcd_peer))
        return [
            self._program("etcd"),
            *("--name=test", f"--data-dir={self._state / 'etcd'}", "--unsafe-no-fsync=true"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=test={peer}"),
        ]

    def apiserver(self) -> list[str]:
        """The API server: RBAC, an audit log, and owner references checked as on a hardened cluster."""
        accounts = self._pki / "service-accounts"
        return [
            self._program("kube-apiserver"),
            f"--etcd-servers=http://{HOST}:{self.ports.etcd}",
            *(f"--bind-address={self.api_host}", f"--secure-port={self.ports.apiserver}"),
            f"--advertise-address={ADVERTISED}",
            # Where it listens on loopback only, its Service has no endpoint that anybody could reach.
            f"--endpoint-reconciler-type={'none' if self.api_host == HOST else 'lease'}",
            *(
                f"--tls-cert-file={self._pki / 'apiserver.crt'}",
                f"--tls-private-key-file={self._pki / 'apiserver.key'}",
            ),
            f"--client-ca-file={self._pki / 'ca.crt'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts}.pub",
            f"--service-account-signing-key-file={accounts}.key",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--allow-privileged=true",
            f"--audit-policy-file={self._state / 'audit-policy.yaml'}",
            f"--audit-log-path={self._state / AUDIT_LOG}",
            "--audit-log-maxsize=100000",  # in MB: never rotated, or a test would lose sight of it
        ]

    def controller_manager(self) -> list[str]:
        """The controller manager. Its volumes are empty directories that nobody mounts."""
        kubeconfig = self.kubeconfig("controller-manager")
        return [
            self._program("kube-controller-manager"),
            *(f"--kubeconfig={kubeconfig}", "--secure-port=0", "--leader-elect=false"),
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._pki / 'service-accounts.key'}",
            f"--root-ca-file={self._pki / 'ca.crt'}",
            *(
                f"--cluster-signing-cert-file={self._pki / 'ca.crt'}",
                f"--cluster-signing-key-file={self._pki / 'ca.key'}",
            ),
            "--enable-hostpath-provisioner=true",
            *("--concurrent-deployment-syncs=10", "--concurrent-statefulset-syncs=10", "--concurrent-job-syncs=10"),
            *CLIENT_LIMITS,
        ]

    def scheduler(self) -> list[str]:
        """The scheduler."""
        return [
            self._program("kube-scheduler"),
            *(f"--kubeconfig={self.kubeconfig('scheduler')}", "--secure-port=0", "--leader-elect=false"),
            *CLIENT_LIMITS,
        ]

    def jobset(self) -> tuple[list[str], dict[str, str]]:
        """The JobSet controller and its environment."""
        command = [self._program("jobset"), f"--config={self._state / 'jobset.yaml'}", "--zap-log-level=info"]
        return command, {"KUBECONFIG": str(self.kubeconfig("jobset"))}

    def kwok(self, stages: list[Path]) -> list[str]:
        """Kwok: the kubelet of every fake node."""
        return [
            self._program("kwok"),
            f"--kubeconfig={self.kubeconfig('kwok')}",
            f"--manage-nodes-with-annotation-selector={FAKE_NODE}",
            "--node-lease-duration-seconds=0",  # a stage keeps the nodes alive instead
            *(f"--cidr={POD_RANGE}", f"--server-address={HOST}:{self.ports.kwok}"),
            *(f"--config={stage}" for stage in stages),
        ]

    def _jobset_configuration(self, certificates: Path) -> dict[str, Any]:
        return {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            # It would wait for a Secret that a kubelet mounts.
            "internalCertManagement": {"enable": False},
            "webhook": {"host": HOST, "port": self.ports.jobset_webhook, "certDir": str(certificates)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
        }

    def _program(self, name: str) -> str:
        return str(self._programs[name])

    def _write_yaml(self, name: str, document: Mapping[str, Any]) -> None:
        (self._state / name).write_text(yaml.safe_dump(dict(document), sort_keys=False))
