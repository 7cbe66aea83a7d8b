"""The node's addresses, and the fence that keeps them on this machine.

Pods sit on a bridge of their own. Nothing that comes from them or is addressed to them, to a Service or to the node
leaves by a real interface or comes in by one; a pod that tries gets a refusal at once.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from control_plane.cluster import ClusterError
from control_plane.cluster.components import ADVERTISED, SERVICE_RANGE

NODE_ADDRESS = ADVERTISED
"""Where pods reach the API server, the kubelet and the name server: on the loopback interface. Endpoints may not be
127.x, and every other address of a machine can change or be seen from outside."""
POD_RANGE = "10.244.0.0/24"
DNS_ADDRESS = "10.96.0.10"
BRIDGE = "inflight0"
CHAIN_PREFIXES = ("INFLIGHT-", "KUBE-")
"""Of the netfilter chains that are made for a node: ours, and kube-proxy's."""
SYSCTLS = {"net.ipv4.ip_forward": "1", "net.bridge.bridge-nf-call-iptables": "1"}
CLUSTER_RANGES = (SERVICE_RANGE, POD_RANGE, f"{NODE_ADDRESS}/32")
COMMAND_DEADLINE_S = 30.0


def fence_rules() -> str:
    """The fence, for ``iptables-restore``.

    What leaves is judged in POSTROUTING: in OUTPUT a packet to a Service still has the interface that it would have
    taken before its destination was changed.
    """
    out, into = "INFLIGHT-OUT", "INFLIGHT-IN"
    mangle = [
        *(f":{chain} - [0:0]" for chain in (out, into)),
        *(f"-A {out} -o {device} -j RETURN" for device in ("lo", BRIDGE)),
        *(f"-A {into} -i {device} -j RETURN" for device in ("lo", BRIDGE)),
        *(f"-A {chain} {side} {addresses} -j DROP"
          for chain in (out, into) for side in ("-s", "-d") for addresses in CLUSTER_RANGES),
        f"-I POSTROUTING 1 -j {out}",
        f"-I PREROUTING 1 -j {into}",
    ]  # fmt: skip
    forward = "INFLIGHT-FORWARD"
    filtered = [
        f":{forward} - [0:0]",
        # Other software, Docker for one, lets nothing be forwarded that is not allowed.
        f"-A {forward} -i {BRIDGE} -o {BRIDGE} -j ACCEPT",
        f"-A {forward} -i {BRIDGE} -j REJECT",
        f"-A {forward} -o {BRIDGE} -j DROP",
        f"-I FORWARD 1 -j {forward}",
    ]
    tables = {"mangle": mangle, "filter": filtered}
    return "".join(f"*{table}\n" + "\n".join(rules) + "\nCOMMIT\n" for table, rules in tables.items())


def check_free() -> None:
    """See that this machine is not in a network that the fence would cut it off from.

    Raises:
        ClusterError: one of its own networks has addresses in common with the cluster's.
    """
    for line in run(["ip", "-4", "-o", "address", "show"]).splitlines():
        _, device, _, address, *_ = line.split()
        network = ipaddress.ip_interface(address).network
        for taken in CLUSTER_RANGES:
            if network.overlaps(ipaddress.ip_network(taken)):
                raise ClusterError(f"{device} has {address}: a node here needs {taken} for itself")


def set_up() -> None:
    """Raise the fence, then the node's address and forwarding. The teardown takes all of it away."""
    run(["iptables-restore", "--noflush", "--wait"], fence_rules())
    run(["ip", "address", "replace", f"{NODE_ADDRESS}/32", "dev", "lo"])
    if not bridges_are_filtered():
        run(["modprobe", "br_netfilter"])
    for name, value in SYSCTLS.items():
        sysctl_file(name).write_text(value)


def bridges_are_filtered() -> bool:
    """Whether the kernel can show netfilter what passes a bridge; elsewhere that is a module to be loaded."""
    return Path("/proc/sys/net/bridge").exists()


def sysctl_file(name: str) -> Path:
    """Where a kernel setting is read and written."""
    return Path("/proc/sys", *name.split("."))


def write_cni(directory: Path, addresses: Path) -> None:
    """Write the pods' network configuration: one bridge, no masquerading, no ports of the host.

    Args:
        directory: where containerd looks for it.
        addresses: where the given addresses are written down.
    """
    ipam = {
        "type": "host-local",
        "dataDir": str(addresses),
        "ranges": [[{"subnet": POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    network: Mapping[str, Any] = {"cniVersion": "0.4.0", "name": "inflight", "plugins": [bridge]}
    directory.mkdir(parents=True)
    (directory / "10-inflight.conflist").write_text(json.dumps(network, indent=2))


def run(command: Sequence[str], stdin: str | None = None) -> str:
    """Run a command of the machine and return what it printed.

    Raises:
        ClusterError: it failed, or did not end in time.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{shown}: {error}") from error
    if done.returncode != 0:
        raise ClusterError(f"{shown} ended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout
