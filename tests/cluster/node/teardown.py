"""Takes the node off this machine again, when containerd, the kubelet and the rest have been killed.

Run as ``python -I teardown.py STATE`` by the cluster's keeper. ``STATE/machine.json`` tells what was there before. What
is there no more is no error; what cannot be removed is told, and the exit code is 1.

Standard library and the guardian only: it has to work when the process that started the cluster is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inflight_runtime.local import guardian

MACHINE = "machine.json"
CGROUPS = Path("/sys/fs/cgroup")
POD_CGROUP = "kubepods"
CONTAINERS = "containerd-run/io.containerd.runtime.v2.task"
PROGRAMS = ("containerd", "etcd", "kube", "coredns", "jobset")
RUNC = Path("/run/containerd/runc")
DEADLINE_S = 10.0
COMMAND_DEADLINE_S = 20.0
POLL_S = 0.05


def take_down(state: Path) -> list[str]:
    """Remove everything; return what is left."""
    machine: dict[str, Any] = json.loads((state / MACHINE).read_text())
    steps: list[tuple[str, Callable[[], bool]]] = [
        ("processes", lambda: end_processes(state)),
        ("mounts", lambda: unmount([str(state), *machine["mounts_below"]])),
        ("leavings of shims", lambda: remove_leavings(state)),
        ("interfaces", lambda: remove_bridge(machine["bridge"])),
        ("the node's address", lambda: remove_address(machine["address"])),
        # After everything that could send a packet.
        ("netfilter rules", lambda: remove_rules(machine["chain_prefixes"])),
        ("kernel settings", lambda: restore_settings(machine["sysctls"])),
        ("cgroups", remove_cgroups),
        ("directories", lambda: remove_directories(machine["new_directories"])),
    ]
    return [what for what, step in steps if not attempt(what, step)]


def attempt(what: str, step: Callable[[], bool]) -> bool:
    """Run one step, so that the others are run whatever becomes of it."""
    try:
        return step()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        sys.stderr.write(f"{what}: {error}\n")
        return False


def end_processes(state: Path) -> bool:
    """Kill this node's shims with everything in them, and whatever else is in a pod's cgroup.

    The daemons have been killed already, unless the keeper was.
    """
    gone = guardian.kill_family(node_processes(state), DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while pids := pod_processes():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return gone


def node_processes(state: Path) -> list[int]:
    """The node's programs that work with this state, the shims between containerd and the containers among them."""
    found = []
    for entry in guardian.PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                program, *arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if Path(program).name.startswith(PROGRAMS) and any(f"{state}/" in part for part in arguments):
                    found.append(int(entry.name))
    return found


def pod_cgroups() -> Iterator[Path]:
    """Every cgroup of pods, the innermost first, in each hierarchy (cgroup v1) or the only one (v2)."""
    for root in sorted({*CGROUPS.glob(POD_CGROUP), *CGROUPS.glob(f"*/{POD_CGROUP}")}):
        for directory, _, _ in os.walk(root, topdown=False):
            yield Path(directory)


def pod_processes() -> set[int]:
    """Processes in a cgroup of pods that are not just waiting to be reaped."""
    pids = set()
    for cgroup in pod_cgroups():
        with contextlib.suppress(OSError):
            pids |= {int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()}
    table = guardian.process_table()
    return {pid for pid in pids if pid in table and table[pid].state not in "ZX"}


def unmount(places: list[str]) -> bool:
    """Unmount what is mounted below these directories."""
    deadline = time.monotonic() + DEADLINE_S
    while points := mounts_below(places):
        # Detached at once: what still holds one open, a namespace that is going, lets it go by itself.
        subprocess.run(["umount", "--lazy", *points], timeout=COMMAND_DEADLINE_S, check=False)
        if time.monotonic() > deadline:
            return False
    return True


def mounts_below(places: list[str]) -> list[str]:
    """Mount points below directories, the innermost first."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [point for point in reversed(points) if any(point.startswith(f"{place}/") for place in places)]


def remove_leavings(state: Path) -> bool:
    """Remove the shims' sockets and runc's notes: they lie in places that are compiled in, and kill -9 leaves them."""
    for address in state.glob(f"{CONTAINERS}/*/*/address"):
        socket = Path(address.read_text().strip().removeprefix("unix://"))
        if socket.is_socket():
            socket.unlink()
    for bundle in state.glob(f"{CONTAINERS}/*/*"):
        shutil.rmtree(RUNC / bundle.parent.name / bundle.name, ignore_errors=True)
    return True


def remove_bridge(bridge: str) -> bool:
    """Remove the pods' interfaces and the bridge; the namespaces that they lead into are gone or going."""
    device = Path("/sys/class/net", bridge)
    deadline = time.monotonic() + DEADLINE_S
    while device.exists():
        for name in [*(member.name for member in (device / "brif").iterdir()), bridge]:
            # One whose namespace goes at this moment goes by itself.
            command = ["ip", "link", "delete", name]
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=COMMAND_DEADLINE_S, check=False)
        if time.monotonic() > deadline:
            return False
    return True


def remove_address(address: str) -> bool:
    """Take the node's address from the loopback interface."""
    if printed(["ip", "-o", "address", "show", "dev", "lo", "to", address]):
        printed(["ip", "address", "delete", address, "dev", "lo"])
    return True


def remove_rules(prefixes: list[str]) -> bool:
    """Remove the chains of these prefixes and the rules that lead into them, each table in one transaction."""
    for tool in ("iptables", "ip6tables"):
        if removal := removal_of(printed([f"{tool}-save"]), tuple(prefixes)):
            printed([f"{tool}-restore", "--noflush", "--wait"], removal)
    return True


def removal_of(saved: str, prefixes: tuple[str, ...]) -> str:
    """What to give to ``iptables-restore`` so that chains of these prefixes go; empty when there are none."""
    script = []
    # Translation of addresses goes first, the fence (in the other tables) after it.
    for table in sorted(saved.split("COMMIT\n"), key=lambda text: "*nat\n" not in text):
        lines = [line for line in table.splitlines() if line and not line.startswith("#")]
        ours = [line[1:].split()[0] for line in lines if line.startswith(":") and line[1:].startswith(prefixes)]
        if not ours:
            continue
        calls = [line for line in lines if line.startswith("-A ") and not line[3:].startswith(prefixes)]
        script += [
            lines[0],
            *(f":{chain} - [0:0]" for chain in ours),  # empties it
            *(f"-D {line[3:]}" for line in calls if line.rpartition(" -j ")[2].split()[0] in ours),
            *(f"-X {chain}" for chain in ours),
            "COMMIT",
        ]
    return "\n".join([*script, ""]) if script else ""


def restore_settings(before: dict[str, str]) -> bool:
    """Write back what the node, the kubelet and kube-proxy have changed."""
    for file, value in before.items():
        if Path(file).read_text().strip() != value:
            Path(file).write_text(value)
    return True


def remove_cgroups() -> bool:
    """Remove the cgroups of pods; the kernel needs a moment after the last process."""
    deadline = time.monotonic() + DEADLINE_S
    while left := [*pod_cgroups()]:
        for cgroup in left:
            with contextlib.suppress(OSError):
                cgroup.rmdir()
        if time.monotonic() > deadline:
            return False
    return True


def remove_directories(new: list[str]) -> bool:
    """Remove the directories outside of the state that were not there before."""
    for directory in new:
        shutil.rmtree(directory, ignore_errors=True)
    return not any(Path(directory).exists() for directory in new)


def printed(command: list[str], stdin: str | None = None) -> str:
    """Run a command and return what it printed; one that fails raises, and has told why."""
    return subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, text=True, timeout=COMMAND_DEADLINE_S, check=True
    ).stdout


def main() -> int:
    """Take the node down; 1 when something is left."""
    left = take_down(Path(sys.argv[1]))
    if left:
        sys.stderr.write(f"left on this machine: {', '.join(left)}\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
