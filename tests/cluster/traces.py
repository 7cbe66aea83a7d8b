"""What a node leaves its mark on: read before and after, the two must be alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from cluster.images import store
from cluster.node import machine, network, teardown

MOUNTS = re.compile(r"inflight-node-|/run/netns/|/kubelet/|/containerd/")
CGROUPS = re.compile(r"kube|k8s|containerd")
"""A machine has other mounts and cgroups, which come and go."""


class Traces(NamedTuple):
    """The state of a machine, as far as a node changes it."""

    processes: frozenset[str]
    mounts: frozenset[str]
    interfaces: frozenset[str]
    addresses: frozenset[str]
    rules: frozenset[str]
    settings: tuple[str, ...]
    cgroups: frozenset[str]
    files: frozenset[str]


def traces_at_rest() -> Traces:
    """Read it all when there is no node, after waiting for the end of one that somebody else has up."""
    machine.check()  # brings the programs that tell of traces
    with machine.claimed():
        return traces()


def traces() -> Traces:
    """Read it all."""
    settings = [network.sysctl_file(name) for name in machine.SETTINGS]
    return Traces(
        processes=frozenset(_processes()),
        mounts=frozenset(_mounts()),
        interfaces=frozenset(device.name for device in Path("/sys/class/net").iterdir()),
        addresses=frozenset(line.strip() for line in network.run(["ip", "-4", "-o", "address"]).splitlines()),
        rules=frozenset(rule for tool in ("iptables", "ip6tables") for rule in _rules(tool)),
        settings=tuple(file.read_text() for file in settings if file.exists()),
        cgroups=frozenset(path for path in map(str, teardown.CGROUPS.glob("**/")) if CGROUPS.search(path)),
        files=frozenset(_files()),
    )


def _mounts() -> list[str]:
    """All but those of images that are built meanwhile."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if MOUNTS.search(line) and str(store.directory()) not in line]


def _processes() -> list[str]:
    """Those of a node: in a cgroup of pods, or with a node's state directory on the command line."""
    found = [f"pod process {pid}" for pid in teardown.pod_processes()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "inflight-node-" in command:
                found.append(f"{entry.name} {command}")
    return found


def _rules(tool: str) -> list[str]:
    """Rules and chains, without the tables' own (a table that was used once stays, empty)."""
    lines = network.run([f"{tool}-save"]).splitlines()
    return [f"{tool} {line}" for line in lines if line.startswith("-A") or (line.startswith(":") and " - " in line)]


def _files() -> list[str]:
    places = [*map(Path, machine.DIRECTORIES), *Path("/tmp").glob("inflight-node-*"), *Path("/run/netns").glob("*")]
    return [str(path) for place in places if place.exists() for path in (place, *place.rglob("*"))]
