"""`inflight run` as a process: started, followed by what it writes, and ended in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Roles, busy_seconds

POLL_S = 0.1
END_GRACE_S = 90.0
STEADY_AFTER = 10
"""Steps left out at the begin: the first updates join their pairs, the first batches wait for the first answers."""
STEADY_WITHIN_S = 300.0
STOPPED = 143
"""Exit code of a run that was ended by SIGTERM, with a checkpoint."""
LOG_LINES = 15


class RunFailedError(Exception):
    """A run ended, or stood still, where it should not; the message has what it printed and logged last."""


@dataclass(frozen=True, slots=True)
class Window:
    """What went on between two moments of a run.

    Attributes:
        begin, end: Unix times.
        cpu_s: CPU time of each role.
        others_cpu_s: CPU time of everything on the machine that is no role: this benchmark, and what else runs here.
    """

    begin: float
    end: float
    cpu_s: dict[str, float]
    others_cpu_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class BenchRun:
    """An `inflight run` that goes on beside."""

    def __init__(self, name: str, directory: Path, process: subprocess.Popen[bytes], printed: Path) -> None:
        self.name = name
        self.directory = directory
        self._process = process
        self._printed = printed
        self._stepped = 0
        self._read = 0

    def records(self, file: str) -> list[dict[str, Any]]:
        """The whole lines of one of the run's JSON-lines files; empty while it is not there."""
        try:
            text = (self.directory / file).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self) -> int:
        """Steps that are done; only what is new of the file is read."""
        with contextlib.suppress(OSError), (self.directory / "metrics.jsonl").open("rb") as file:
            file.seek(self._read)
            new = file.read()
            self._read += len(new)
            self._stepped += new.count(b"\n")
        return self._stepped

    def wait_until_steady(self) -> Roles:
        """Wait for the first steps to be over and every server to follow; returns the roles' processes.

        Raises:
            RunFailedError: the run ended before, or takes too long.
        """
        deadline = time.monotonic() + STEADY_WITHIN_S
        while unsteady := self._unsteady():
            self.check()
            if time.monotonic() > deadline:
                raise self.failure(f"{unsteady} within {STEADY_WITHIN_S:.0f} s")
            time.sleep(POLL_S)
        return Roles.of(self._process.pid, self.directory)

    def _unsteady(self) -> str:
        """What has not happened yet; empty once it is steady."""
        if self.steps() < STEADY_AFTER:
            return f"did not do {STEADY_AFTER} steps"
        # A run begins when its first server is ready: the others come later.
        servers = {path.stem for path in (self.directory / "config").glob("inference-*.json")}
        missing = servers - {record["server"] for record in self.records("updates.jsonl") if record["ok"]}
        return f"brought no weights to {', '.join(sorted(missing))}" if missing else ""

    def measure(self, roles: Roles, during: Callable[[], None]) -> Window:
        """Do something while the run goes on, and look at the CPU time before and after.

        Raises:
            RunFailedError: the run ended meanwhile.
        """
        begin, busy, spent = time.time(), busy_seconds(), roles.cpu_seconds()
        during()
        end, busy_after, spent_after = time.time(), busy_seconds(), roles.cpu_seconds()
        self.check()
        cpu = {name: spent_after[name] - seconds for name, seconds in spent.items()}
        return Window(begin, end, cpu, max(0.0, busy_after - busy - sum(cpu.values())))

    def check(self) -> None:
        """Make sure that the run goes on.

        Raises:
            RunFailedError: it does not.
        """
        if (code := self._process.poll()) is not None:
            raise self.failure(f"ended too early, with exit code {code}")

    def stop(self) -> None:
        """End the run as Ctrl-C would, with a checkpoint.

        Raises:
            RunFailedError: it did not end in order.
        """
        self.check()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            raise self.failure(f"was still there {END_GRACE_S:.0f} s after SIGTERM") from None
        if code != STOPPED:
            raise self.failure(f"ended on SIGTERM with exit code {code} instead of {STOPPED}")

    def failure(self, what: str) -> RunFailedError:
        """An error with the last lines of all that the run wrote."""
        files = [self._printed, *sorted((self.directory / "logs").glob("*.log"))]
        tails = []
        for file in files:
            with contextlib.suppress(OSError):
                lines = file.read_text(errors="replace").splitlines()[-LOG_LINES:]
                tails.append(f"--- {file.name} ---\n" + "\n".join(lines))
        return RunFailedError("\n".join([f"the run {self.name} {what}", *tails]))


@contextlib.contextmanager
def bench_run(name: str, job: Path, scratch: Path, overrides: Sequence[str]) -> Iterator[BenchRun]:
    """Start a run; whatever happens, nothing of it is left afterwards.

    Args:
        name: for people, unique.
        job: the job file.
        scratch: directory that gets the run directory.
        overrides: `path=value` each.
    """
    directory, printed = scratch / name, scratch / f"{name}.txt"
    command = [sys.executable, "-m", "inflight_runtime", "run", str(job), "--plain", "--run-dir", str(directory)]
    command += ["--ready-timeout", f"{STEADY_WITHIN_S:g}"]
    for override in overrides:
        command += ["--set", override]
    with printed.open("wb") as sink:
        # Not a session of its own: this process is a client whose tokens are timed, and Linux shares the cores out
        # among sessions first (autogroup).
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0
        )
    try:
        yield BenchRun(name, directory, process, printed)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its guardian ends the roles
                process.wait(END_GRACE_S)
