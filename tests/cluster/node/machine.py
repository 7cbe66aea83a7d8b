"""The machine that becomes a node: what it needs, that nobody else uses it so, and what it was like before."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from cluster.packages import ensure_programs
from control_plane.cluster import ClusterError
from inflight_runtime.local import guardian

from . import network, teardown

CNI_PLUGINS = Path("/usr/lib/cni")
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    "iptables-restore": "iptables",
    "ip": "iproute2",
    "umount": "mount",
}
"""The Debian package of each program."""
LOCK = Path("/run/lock/inflight-node.lock")
LOCK_DEADLINE_S = 900.0
LOCK_POLL_S = 0.5
REMAINS_DEADLINE_S = 120.0
DIRECTORIES = ("/var/lib/kubelet", "/var/log/containers", "/run/containerd")
"""Compiled into the kubelet and containerd's shims; everything else is in the cluster's state directory."""
SETTINGS = (
    *network.SYSCTLS,
    # The kubelet's own.
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)
"""Kernel settings that are put back at the end."""


def check() -> None:
    """See that this machine can be a node, and install what is missing.

    Raises:
        ClusterError: it cannot; the message says why and what to do.
    """
    if sys.platform != "linux":
        raise ClusterError("a node needs Linux: containers, cgroups and network namespaces")
    if os.geteuid() != 0:
        raise ClusterError("a node needs root: it starts containers and makes interfaces, mounts and netfilter rules")
    ensure_programs(PACKAGES)
    if not network.bridges_are_filtered():
        ensure_programs({"modprobe": "kmod"})


@contextlib.contextmanager
def claimed() -> Iterator[TextIO]:
    """Keep this machine for one node: its addresses, cgroups and rules exist once. Waits while another is up.

    Raises:
        ClusterError: another one stayed up, or this machine is a node of some other cluster.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a+") as lock:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        told = False
        while not _locked(lock):
            lock.seek(0)
            if time.monotonic() > deadline:
                raise ClusterError(f"another node is up on this machine: {lock.read().strip()}")
            if not told:
                sys.stderr.write(f"test cluster: another node is up on this machine; waiting ({lock.read().strip()})\n")
                told = True
            time.sleep(LOCK_POLL_S)
        _clear_remains(lock)
        _check_alone()
        network.check_free()
        yield lock


def record(state: Path, lock: TextIO, mounts_below: list[Path]) -> None:
    """Write down what this machine is like, for the teardown, and whose it is now.

    Args:
        state: the cluster's state directory.
        lock: what :func:`claimed` gave.
        mounts_below: directories outside of the state that containerd mounts something in.
    """
    files = [network.sysctl_file(name) for name in SETTINGS]
    before = {
        "sysctls": {str(file): file.read_text().strip() for file in files if file.exists()},
        "mounts_below": [str(path) for path in mounts_below],
        "bridge": network.BRIDGE,
        "address": f"{network.NODE_ADDRESS}/32",
        "chain_prefixes": network.CHAIN_PREFIXES,
        "new_directories": [directory for directory in DIRECTORIES if not Path(directory).exists()],
    }
    (state / teardown.MACHINE).write_text(json.dumps(before, indent=2))
    lock.truncate(0)
    lock.write(f"process {os.getpid()}, state {state}\n")
    lock.flush()


def teardown_command(state: Path) -> list[str]:
    """The command that takes the node off this machine."""
    return [sys.executable, "-I", teardown.__file__, str(state)]


def _locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clear_remains(lock: TextIO) -> None:
    """Take down a node whose keeper was killed as well; whoever ended in order has left no state directory."""
    lock.seek(0)
    state = Path(lock.read().strip().rpartition(" ")[2])
    if (state / teardown.MACHINE).is_file():
        subprocess.run(teardown_command(state), timeout=REMAINS_DEADLINE_S, check=False)
        shutil.rmtree(state, ignore_errors=True)


def _check_alone() -> None:
    """Refuse a machine on which another kubelet is at work: the teardown would end its pods as well."""
    for pid, process in guardian.process_table().items():
        with contextlib.suppress(OSError):
            if process.state not in "ZX" and Path(f"/proc/{pid}/comm").read_text().strip() == "kubelet":
                raise ClusterError(f"this machine is a node of another cluster already (kubelet, process {pid})")
    if pids := teardown.pod_processes():
        raise ClusterError(f"there are pods on this machine that no kubelet looks after (processes {sorted(pids)})")
