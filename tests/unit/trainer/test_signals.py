"""In processes of their own: a handler belongs to the main thread, and the deadline ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

DEADLINE_S = 60.0
PROGRAM = """
import logging, sys, threading
from inflight_runtime.trainer import signals

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
stop = signals.StopRequest({deadline})
stop.install()
{body}
"""
STUCK = 'print("ready", flush=True); threading.Event().wait()'
WITH_LOCKS_HELD = """
with threading._active_limbo_lock, logging.getLogger().handlers[0].lock:
    print("ready", flush=True)
    while not stop.requested:
        pass
sys.stdout.write("stopping\\n")  # one piece: print() writes two, and the log may come between
sys.stdout.flush()
threading.Event().wait()
"""
OF_ANOTHER_RANK = 'print("ready", flush=True); stop.note(15); threading.Event().wait()'


def program(body: str, deadline_s: float) -> subprocess.Popen[str]:
    text = PROGRAM.format(body=body, deadline=deadline_s)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "ready":
        assert process.poll() is None
    return process


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_stuck_ends_at_the_deadline(signum: signal.Signals, code: int) -> None:
    process = program(STUCK, 0.5)
    process.send_signal(signum)
    found, output = finished(process)
    assert found == code
    assert f"{signum.name}: finishing the step, then a checkpoint; at most 0.5 s" in output
    assert "ending without a further checkpoint" in output


def test_a_second_signal_neither_ends_it_nor_begins_another_deadline() -> None:
    process = program(STUCK, 2.0)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert "finishing the step" in process.stdout.readline()
    began = time.monotonic()
    for signum in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(signum)
    found, output = finished(process)
    assert found == 143, "the first one counts"
    assert time.monotonic() - began > 1.0
    assert "finishing the step" not in output


def test_a_signal_that_interrupts_whoever_holds_a_lock_is_taken() -> None:
    process = program(WITH_LOCKS_HELD, 1.0)
    process.send_signal(signal.SIGTERM)
    found, output = finished(process)
    assert (found, output.count("stopping\n")) == (143, 1)


def test_the_deadline_holds_for_a_signal_that_came_to_another_rank() -> None:
    found, output = finished(program(OF_ANOTHER_RANK, 0.5))
    assert found == 143
    assert "ending without a further checkpoint" in output
