"""An environment that blocks the event loop is named, and in the end the process is given up."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, logging, sys, time
from inflight_runtime.actor import watchdog

logging.basicConfig(level=logging.INFO)
watchdog.CHECK_S, watchdog.WARN_AFTER_S = 0.05, 0.3

def blocking_rollout():
    time.sleep(float(sys.argv[1]))

async def main():
    watch = watchdog.LoopWatchdog(asyncio.get_running_loop(), give_up_after_s=float(sys.argv[2]))
    await asyncio.sleep(0.2)
    blocking_rollout()
    watch.close()

asyncio.run(main())
"""


def run(block_s: float, give_up_after_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(block_s), str(give_up_after_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_blocked_loop_is_reported_with_the_place():
    done = run(block_s=3.0, give_up_after_s=90.0)
    assert done.returncode == 0, done.stderr
    assert "the event loop has been blocked" in done.stderr
    assert "in blocking_rollout" in done.stderr


def test_a_loop_that_stays_blocked_ends_the_process():
    done = run(block_s=90.0, give_up_after_s=1.0)
    assert done.returncode == 1
    assert "giving up" in done.stderr
