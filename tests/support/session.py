"""Which processes a test session has started, and their end when the session itself is killed.

Every process that a test starts inherits a mark by its environment, so that one whose parent has died, or which is a
session of its own, is found as well. ``python session.py PID MARK`` waits for the end of process PID, however it comes,
and then kills what carries the mark. Keepers of clusters end theirs in good order, so they are waited for first.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

MARK = "INFLIGHT_TEST_SESSION"
KEEPER = "keeper.py"
KEEPERS_END_S = 90.0
KILLED_END_S = 30.0
POLL_S = 0.05


def started(mark: str) -> Iterator[psutil.Process]:
    """The processes with this mark, but for this one; Python's own resource tracker ends with its interpreter."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get(MARK) != mark:
                continue
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                yield process


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each of them; one that has gone meanwhile is no error."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def watch(mark: str) -> None:
    """Have the processes with this mark end with this one."""
    command = [sys.executable, __file__, str(os.getpid()), mark]
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    process = subprocess.Popen(
        command, env=unmarked, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    process.returncode = 0  # it outlives this process, which need not be told so


def is_keeper(process: psutil.Process) -> bool:
    """Whether this process ends a cluster."""
    with contextlib.suppress(psutil.Error):
        return any(argument.endswith(KEEPER) for argument in process.cmdline())
    return False


def main() -> None:
    session, mark = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(session)], [], [])  # a zombie counts as ended
    deadline = time.monotonic() + KEEPERS_END_S
    while any(map(is_keeper, started(mark))) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    deadline = time.monotonic() + KILLED_END_S
    while (left := list(started(mark))) and time.monotonic() < deadline:  # one that ends may just have started another
        kill(left)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
