"""The processes of one cluster: each in a session of its own with a log file, all ended by a keeper."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight_runtime.local import guardian

from . import keeper
from .errors import ClusterError
from .waiting import POLL_S

LOG_LINES = 40
STOP_DEADLINE_S = 60.0
GOGC = "400"
"""Go's collector takes a fifth of an API server's time; memory is what there is more of here."""


class Processes:
    """Starts processes, watches them, and ends them all with :meth:`stop`, or when this process dies.

    Args:
        state: the cluster's state directory; it goes with the processes.
        held: file descriptors that stay open until everything is gone, even if this process dies: locks.
    """

    def __init__(self, state: Path, held: Sequence[int] = ()) -> None:
        self._state = state
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (state / "logs").mkdir()
        # In a session of its own: a Ctrl-C at the terminal reaches us, not the keeper nor the cluster.
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__, str(state)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=held,
        )

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each component, and of the keeper."""
        return {name: process.pid for name, process in self._processes.items()} | {"keeper": self._keeper.pid}

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start a process; its output goes to ``logs/NAME.log``."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._state,
                env=os.environ | {"HOME": str(self._state), "GOGC": GOGC} | (environment or {}),
            )
        self._processes[name] = process
        # Not reaped yet, so it is in the table even if it has ended already.
        start = guardian.process_table()[process.pid].start
        self._tell_keeper(f"{process.pid} {start}")

    def end(self, name: str) -> None:
        """End one process at once, with all that it has started.

        Raises:
            ClusterError: something of it is still running.
        """
        process = self._processes.pop(name)
        if not guardian.kill_family([process.pid]):
            raise ClusterError(f"{name} (process {process.pid}) does not end")
        process.wait(STOP_DEADLINE_S)

    def at_end(self, command: list[str]) -> None:
        """Have a command run when every process is gone, before the state directory is; the newest comes first."""
        self._tell_keeper(json.dumps(command))

    def _tell_keeper(self, line: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{line}\n".encode())
        self._keeper.stdin.flush()

    def log(self, name: str) -> Path:
        """The log file of a component."""
        return self._state / "logs" / f"{name}.log"

    def log_tail(self, name: str, lines: int = LOG_LINES) -> str:
        """The newest lines of a component's log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        return "(no log)"

    def check(self) -> None:
        """Look whether everything is still running.

        Raises:
            ClusterError: a component has ended; the message holds the end of its log.
        """
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                raise ClusterError(f"{name} ended with {code}; the end of its log:\n{self.log_tail(name)}")

    def wait(self, what: str, component: str, probe: Callable[[], bool], deadline_s: float) -> None:
        """Wait until ``probe`` holds, for which ``component`` is waited for.

        Raises:
            ClusterError: it did not in time, or a component ended; the message holds the end of the log.
        """
        end = time.monotonic() + deadline_s
        while not probe():
            self.check()
            if time.monotonic() > end:
                tail = self.log_tail(component)
                raise ClusterError(f"{what}: not within {deadline_s:g} s; the end of {component}'s log:\n{tail}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End every process and remove the state directory; harmless the second time.

        Raises:
            ClusterError: something is still running.
        """
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            code = self._keeper.wait(STOP_DEADLINE_S)
            for process in self._processes.values():
                process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"the cluster of {self._state} does not end: {error}") from error
        if code != 0:
            raise ClusterError(f"the keeper of {self._state} ended with {code}; these were its processes: {self.pids}")
