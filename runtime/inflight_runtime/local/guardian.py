"""Ends the roles of a run when the executor itself is gone (kill -9, out of memory).

Run as ``python -I -S guardian.py [GRACE_S [SCRATCH]]`` with a pipe as standard input. The executor writes ``+PID`` for
each role it starts and ``-PID`` when the role is gone. End of file means that the executor is no more: whatever is
still registered, with all its descendants, gets SIGTERM (a trainer writes its checkpoint) and after a grace time
SIGKILL. Then the roles' scratch directory is removed.

Standard library only, and no import of this package: it must be small, start at once and never fail on its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

GRACE_S = 20.0
POLL_S = 0.05
PROC = Path("/proc")


class Process(NamedTuple):
    """One line of the process table. ``start`` (clock ticks since boot) tells a reused pid from the process meant."""

    pid: int
    parent: int
    group: int
    session: int
    start: int
    state: str


def process_table() -> dict[int, Process]:
    """Read all processes of the machine by pid; empty where there is no ``/proc``."""
    table = {}
    try:
        names = [entry.name for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return {}
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command stands in parentheses and may hold anything, so the fields are counted from the last one.
            fields = (PROC / name / "stat").read_text().rpartition(")")[2].split()
            pid = int(name)
            table[pid] = Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), fields[0])
    return table


def family(roots: Iterable[int], table: dict[int, Process]) -> dict[int, Process]:
    """Get the living processes that descend from ``roots`` or share a session or group that one of them leads.

    Sessions alone are not enough: torchrun gives each rank a session of its own. Descent alone is not either: a child
    whose parent has died belongs to another process now.
    """
    wanted = set(roots)
    leads = set(wanted)
    found: dict[int, Process] = {}
    changed = True
    while changed:
        changed = False
        for process in table.values():
            if process.pid in found or process.state in "ZX":
                continue
            if process.pid in wanted or process.parent in wanted or leads & {process.group, process.session}:
                found[process.pid] = process
                wanted.add(process.pid)
                if process.pid in (process.group, process.session):
                    leads.add(process.pid)
                changed = True
    return found


def send(signum: int, processes: Iterable[Process]) -> None:
    """Signal each of them; one that has gone meanwhile is no error."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signum)


def kill_family(roots: Iterable[int], deadline_s: float = 5.0) -> bool:
    """SIGKILL everything of ``roots`` until nothing is left; false when something still is after ``deadline_s``."""
    roots = list(roots)
    end = time.monotonic() + deadline_s
    while True:
        table = process_table()
        if not table:
            for root in roots:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(root, signal.SIGKILL)
            return True
        left = family(roots, table)
        if not left:
            return True
        # Those found in one look are remembered as roots: their children must not escape when they die first.
        roots = sorted({*roots, *left})
        send(signal.SIGKILL, left.values())
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)


def end_family(roots: Iterable[int], grace_s: float) -> None:
    """SIGTERM, a grace time, SIGKILL."""
    left = family(roots, process_table())
    every = sorted({*roots, *left})
    send(signal.SIGTERM, left.values())
    end = time.monotonic() + grace_s
    while time.monotonic() < end and family(every, process_table()):
        time.sleep(POLL_S)
    kill_family(every)


def main() -> None:
    """Follow the executor's list until its end of the pipe closes, then end what is left on it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    registered: dict[int, int] = {}
    for line in sys.stdin:
        sign, pid = line[:1], line[1:].strip()
        if not pid.isdigit():
            continue
        if sign == "+":
            entry = process_table().get(int(pid))
            registered[int(pid)] = entry.start if entry else 0
        else:
            registered.pop(int(pid), None)
    table = process_table()
    alive = [pid for pid, start in registered.items() if pid not in table or table[pid].start == start]
    if alive:
        end_family(alive, float(sys.argv[1]) if len(sys.argv) > 1 else GRACE_S)
    for scratch in sys.argv[2:]:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
