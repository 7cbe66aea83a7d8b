"""Ends a test cluster: in the ordinary way, and as well when the process that started it is gone (kill -9, a crash).

Run as ``python keeper.py STATE`` with a pipe as standard input. The starter writes ``PID START`` for each process
(START tells a reused pid from the process meant), and a JSON list for each command that is to be run at the end. End of
file means that the cluster is to end: every process is killed with its whole session, the commands are run, the newest
first, the directories of the cluster's volumes are removed, and then its state directory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from inflight_runtime.local import guardian

AUDIT_LOG = "audit.log"
VOLUMES = Path("/tmp/hostpath_pv")
"""The controller manager's hostpath provisioner makes a directory here for each volume; the place is compiled in."""
COMMAND_DEADLINE_S = 40.0


class Ending(NamedTuple):
    """What the end of a cluster takes: the start time of each pid, and commands."""

    processes: dict[int, int]
    commands: list[list[str]]


def follow_list() -> Ending:
    """Read the starter's list until its end of the pipe closes."""
    ending = Ending({}, [])
    for line in sys.stdin:
        if line.startswith("["):
            ending.commands.append(json.loads(line))
        else:
            pid, _, start = line.partition(" ")
            ending.processes[int(pid)] = int(start)
    return ending


def end_cluster(ending: Ending, state: Path) -> bool:
    """End what is registered and remove what the cluster has made; false when something is still there.

    There is no SIGTERM first: nothing of a test cluster is worth saving, and the API server would take ten seconds.
    """
    table = guardian.process_table()
    roots = [pid for pid, start in ending.processes.items() if pid not in table or table[pid].start == start]
    gone = guardian.kill_family(roots)
    for command in reversed(ending.commands):
        gone = run(command) and gone
    remove_volumes(state / AUDIT_LOG)
    shutil.rmtree(state, ignore_errors=True)
    return gone


def run(command: list[str]) -> bool:
    """Run a command of the ending; it says itself what went wrong."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=COMMAND_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{error}\n")
        return False
    return done.returncode == 0


def remove_volumes(audit_log: Path) -> None:
    """Remove the directories of the volumes whose creation the audit log shows. No pod ever ran, so they are empty."""
    with contextlib.suppress(OSError):
        for line in audit_log.read_text(errors="replace").splitlines():
            if '"hostPath"' not in line:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                path = Path(json.loads(line)["requestObject"]["spec"]["hostPath"]["path"])
                if path.parent == VOLUMES:
                    path.rmdir()
        VOLUMES.rmdir()  # refused while another cluster has volumes there


def main() -> int:
    """Wait for the end of standard input, then end the cluster."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    return 0 if end_cluster(follow_list(), Path(sys.argv[1])) else 1


if __name__ == "__main__":
    sys.exit(main())
