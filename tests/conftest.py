"""Puts ``tests/`` on the path for ``support``; a session fails when a test leaves a process, and ends with them all."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from support import session as processes

GRACE_SECONDS = 5.0

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers and what they start carry the mark of the whole session
    os.environ[processes.MARK] = uuid.uuid4().hex
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline())[:300]}"
    except psutil.Error:
        return f"pid {process.pid}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have what the tests start end with the session, even if that is killed."""
    if not hasattr(session.config, "workerinput"):
        processes.watch(os.environ[processes.MARK])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the processes that tests left behind, name them and fail the session."""
    if hasattr(session.config, "workerinput"):
        return  # one of several workers: the session that started them looks when they have ended
    deadline = time.monotonic() + GRACE_SECONDS
    while left := list(processes.started(os.environ[processes.MARK])):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # scanned anew each time: one that is ending may just have started another
    if not left:
        return
    lines = [_describe(process) for process in left]
    processes.kill(left)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.section("processes left behind by tests", red=True)
        for line in lines:
            reporter.line(line, red=True)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


# Shared cores: how long one example takes says nothing about the code.
settings.register_profile("inflight", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("inflight")
