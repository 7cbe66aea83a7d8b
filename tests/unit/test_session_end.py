"""What the tests of a session have started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).resolve().parents[1]
DEADLINE_S = 60.0
PROGRAM = """
import subprocess, sys, time

def test_that_starts_a_process():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    print("\\npid", process.pid, flush=True)
    process.returncode = 0
    time.sleep({goes_on_s})
"""


@contextmanager
def session(directory: Path, goes_on_s: float) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A test session, and the process that its test has started and does not end."""
    test = directory / "test_that_starts.py"
    test.write_text(PROGRAM.format(goes_on_s=goes_on_s))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-s", str(test)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    process = subprocess.Popen(
        command, env=environment | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        pid = next((line.split()[1] for line in process.stdout if line.startswith("pid ")), None)
        assert pid is not None, "the session has not run its test"
        yield process, psutil.Process(int(pid))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_session_that_is_killed_leaves_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    with session(tmp_path, goes_on_s=600) as (pytest_process, started):
        pytest_process.send_signal(signum)
        started.wait(DEADLINE_S)


def test_a_session_that_leaves_a_process_names_and_ends_it_and_fails(tmp_path: Path) -> None:
    with session(tmp_path, goes_on_s=0) as (pytest_process, started):
        output, _ = pytest_process.communicate(timeout=DEADLINE_S)
        assert pytest_process.returncode == pytest.ExitCode.TESTS_FAILED
        assert f"pid {started.pid}: sleep 600" in output
        started.wait(DEADLINE_S)
