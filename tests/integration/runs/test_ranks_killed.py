"""kill -9 of a rank at many random moments. Minutes long: `make test-ranks-killed`, not a part of CI."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from support.runs import RANKS_GROUPS, check_ledger, local_run, rank_pid, ranks_job

KILLS = int(os.environ.get("INFLIGHT_KILLS", "10"))
SEED = int(os.environ.get("INFLIGHT_KILLS_SEED", "0"))
LONGEST_LIFE_S = 20.0
"""From the import of torch through joining, loading and stepping to some checkpoints, on two slow cores."""
STEPS = 60
pytestmark = [pytest.mark.timeout(1800), pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])]


def test_kill_9_of_a_rank_at_random_moments_and_the_run_completes(
    engine: str, letters_model: Path, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    job = ranks_job(letters_model, engine, STEPS)
    job["spec"]["trainer"]["maxRestarts"] = KILLS
    with local_run(job, tmp_path) as run:
        rank, done = 0, 0
        pid = rank_pid(run, rank)
        while done < KILLS:
            life = dice.uniform(0, LONGEST_LIFE_S)
            deadline = time.monotonic() + life
            while time.monotonic() < deadline and run.process.poll() is None:
                time.sleep(0.05)
            assert run.process.poll() is None, f"over after {done} kills (seed {SEED})\n{run.logs()}"
            os.kill(pid, signal.SIGKILL)
            done += 1
            step: int | str = "?"
            with contextlib.suppress(OSError, ValueError, KeyError):
                step = run.state().step
            told(f"seed {SEED}: kill {done} of {KILLS}, rank {rank}, {life:.1f} s old, run at step {step}")
            rank = dice.randrange(2)
            pid = rank_pid(run, rank, but=pid)
        run.succeed(600)
        counted = check_ledger(run, steps=STEPS, groups_per_step=RANKS_GROUPS)
        assert counted["leased"] == 0
        assert [record["step"] for record in run.metrics()] == list(range(1, STEPS + 1))
        told(f"seed {SEED}: {STEPS} steps, groups {dict(counted)}, trainer starts {starts(run.directory)}")


def told(line: str) -> None:
    """For whoever watches: `pytest -s`."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def starts(directory: Path) -> int:
    """How often the trainer was started."""
    return (directory / "logs" / "trainer.log").read_text().count("--- trainer: start ")
