"""Whole runs: `inflight run` as a process of its own, its roles found, killed and looked at."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib import request

import psutil
import yaml

from inflight_runtime.protocol import RunState

REPOSITORY = Path(__file__).resolve().parents[2]
SORT_LETTERS = REPOSITORY / "examples" / "sort-letters"
POLL_S = 0.05
END_GRACE_S = 60.0
RANK_DEADLINE_S = 60.0
RANKS_GROUPS = 4


@dataclass
class LocalRun:
    """An `inflight run` that goes on in the background.

    Attributes:
        directory: the run directory.
        process: the executor.
        output: file with what it printed.
    """

    directory: Path
    process: subprocess.Popen[bytes]
    output: Path

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def logs(self, lines: int = 25) -> str:
        parts = [f"--- printed ---\n{self.printed()[-4000:]}"]
        for path in sorted((self.directory / "logs").glob("*.log")):
            parts.append(f"--- {path.name} ---\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
        return "\n".join(parts)

    def state(self) -> RunState:
        """What the coordinator says now.

        Raises:
            OSError: it does not answer.
        """
        record = json.loads((self.directory / "run.json").read_text())
        call = request.Request(record["coordinator_url"] + "/v1/state")
        call.add_header("Authorization", f"Bearer {(self.directory / 'token').read_text().strip()}")
        with request.urlopen(call, timeout=10) as reply:
            return RunState.model_validate_json(reply.read())

    def wait_until(self, what: str, holds: Callable[[RunState], bool], timeout_s: float = 120.0) -> RunState:
        """Poll the state until it fits; fail with the logs when the run ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the run ended before {what}\n{self.logs()}"
            with contextlib.suppress(OSError, ValueError, KeyError):
                state = self.state()
                if holds(state):
                    return state
            time.sleep(POLL_S)
        raise AssertionError(f"not {what} within {timeout_s:.0f} s\n{self.logs()}")

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> RunState:
        return self.wait_until(f"step {step}", lambda state: state.step >= step, timeout_s)

    def pids(self, role: str) -> list[int]:
        """Processes that were started with this role's config (`trainer`: the launcher and its ranks)."""
        mark = str(self.directory / "config" / f"{role}.json")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in process.cmdline() or mark in process.environ().values():
                    found.append(process.pid)
        return found

    def kill(self, role: str) -> None:
        """kill -9 of every process of a role at once."""
        pids = self.pids(role)
        assert pids, f"no process of {role} is there\n{self.logs()}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 180.0) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s:.0f} s\n{self.logs()}") from None

    def succeed(self, timeout_s: float = 180.0) -> None:
        """Wait for the end and demand success."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}\n{self.logs()}"

    def metrics(self) -> list[dict[str, Any]]:
        """The last record of each step: what survived, in order."""
        records = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [record for _, record in sorted({record["step"]: record for record in records}.items())]

    def rollouts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "rollouts.jsonl").read_text().splitlines()]

    def ledger(self) -> sqlite3.Connection:
        """The coordinator's ledger, read-only."""
        return sqlite3.connect(f"file:{self.directory / 'coordinator' / 'ledger.sqlite'}?mode=ro", uri=True)


def watch_outstanding(run: LocalRun, *, bound: int, timeout_s: float = 180.0) -> None:
    """Check the number of leased and waiting groups against the bound, as often as possible, until the run ends."""
    most = 0
    deadline = time.monotonic() + timeout_s
    while run.process.poll() is None:
        assert time.monotonic() < deadline, run.logs()
        with contextlib.suppress(OSError, ValueError, KeyError):
            capacity = run.state().capacity
            assert capacity["bound"] == bound
            assert capacity["outstanding"] <= bound
            most = max(most, capacity["outstanding"])
        time.sleep(POLL_S)
    assert most > 0, f"nothing was ever outstanding\n{run.logs()}"


@contextlib.contextmanager
def local_run(job: dict[str, Any], home: Path, *arguments: str) -> Iterator[LocalRun]:
    """Start `inflight run` on a job written into `home`; whatever happens, nothing of it is left afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    job_file = home / "job.yaml"
    job_file.write_text(yaml.safe_dump(job, sort_keys=False))
    shutil.copy(SORT_LETTERS / "sort_letters.py", home)  # an environment is found beside its job file
    directory = home / "run"
    with started(directory, home / "printed.txt", "run", str(job_file), "--run-dir", str(directory), *arguments) as run:
        yield run


@contextlib.contextmanager
def started(directory: Path, output: Path, *command: str) -> Iterator[LocalRun]:
    """Start an `inflight` command that works in `directory`, and end it in order."""
    with output.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "inflight_runtime", *command],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield LocalRun(directory, process, output)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its guardian ends the roles
                process.wait(END_GRACE_S)


def sort_letters_job(model: Path, *, engine: str = "reference", **algorithm: Any) -> dict[str, Any]:
    """The example's job on another model directory, smaller and with one reference server unless asked otherwise."""
    job: dict[str, Any] = yaml.safe_load((SORT_LETTERS / "job.yaml").read_text())
    spec = job["spec"]
    spec["model"]["source"] = str(model)
    del spec["evaluation"]
    spec["inference"] |= {"engine": engine, "replicas": 1}
    if engine == "reference":
        spec["inference"].pop("engineArgs", None)
    spec["algorithm"] |= {"steps": 12, "promptsPerStep": 4, "groupSize": 4} | algorithm
    return job


def ranks_job(model: Path, engine: str, steps: int) -> dict[str, Any]:
    """A short job whose trainer has two ranks."""
    job = sort_letters_job(model, steps=steps, promptsPerStep=RANKS_GROUPS, maxStaleness=2)
    job["spec"]["trainer"] = job["spec"].get("trainer", {}) | {"engine": engine, "processesPerNode": 2}
    job["spec"]["checkpoint"] = {"everySteps": 4, "keep": 2}
    job["spec"]["logging"] = {"rolloutsPerStep": 1000}
    return job


def rank_pid(run: LocalRun, rank: int, but: Collection[int] = ()) -> int:
    """The process of one rank of the trainer, once it is there and none of `but`."""
    deadline = time.monotonic() + RANK_DEADLINE_S
    while time.monotonic() < deadline:
        for pid in run.pids("trainer"):
            try:
                if pid not in but and psutil.Process(pid).environ().get("RANK") == str(rank):
                    return pid
            except psutil.Error:
                continue
        time.sleep(0.1)
    raise AssertionError(f"there is no rank {rank}\n{run.logs()}")


def check_ledger(run: LocalRun, *, steps: int, groups_per_step: int) -> Counter[str]:
    """The ledger adds up: every step is there once, with the groups it was assigned, and none was trained twice."""
    with contextlib.closing(run.ledger()) as database:
        rows = database.execute("SELECT id, state, step FROM groups ORDER BY id").fetchall()
        counted = dict(database.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
    assert len({group for group, _, _ in rows}) == len(rows)
    trained = Counter(step for _, state, step in rows if state == "trained")
    assert set(trained) == set(range(1, steps + 1)), trained
    assert max(trained.values()) <= groups_per_step
    surviving: dict[int, set[int]] = {}
    for record in run.rollouts():  # a replayed step is written again: its last record is what survived
        surviving.setdefault(record["step"], set()).add(record["group"])
    for step, groups in surviving.items():
        members = {group for group, state, number in rows if state == "trained" and number == step}
        assert groups <= members, f"step {step} trained {groups - members}, which are not its members"
    return Counter(counted)
