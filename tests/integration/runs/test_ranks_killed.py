"""kill -9 of a rank at many random moments. Minutes long: `make test-ranks-killed`, not a part of CI."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import RANKS_GROUPS, LocalRun, check_ledger, local_run, rank_pid, ranks_job

KILLS = int(os.environ.get("INFLIGHT_KILLS", "10"))
SEED = int(os.environ.get("INFLIGHT_KILLS_SEED", "0"))
STEPS = 300
LONGEST_START_S = 15.0
"""Of a rank that is to be killed while it starts: in its imports, when it joins, when it loads."""
LONGEST_WORK_S = 3.0
"""Of one that is to be killed after a step: some dozen steps, some checkpoints."""
WORKS_WITHIN_S = 180.0
pytestmark = [pytest.mark.timeout(1800), pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])]


def test_kill_9_of_a_rank_at_random_moments_and_the_run_completes(
    engine: str, letters_model: Path, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    job = ranks_job(letters_model, engine, STEPS)
    job["spec"]["trainer"]["maxRestarts"] = KILLS
    ended: list[int] = []
    with local_run(job, tmp_path) as run:
        for kill in range(1, KILLS + 1):
            rank, starting = dice.randrange(2), dice.random() < 0.4
            life = dice.uniform(0, LONGEST_START_S if starting else LONGEST_WORK_S)
            epoch = newest(run)[0]
            pid = rank_pid(run, rank, but=ended)
            if not starting:
                wait(run, WORKS_WITHIN_S, lambda before=epoch: newest(run)[0] > before)
            wait(run, life)
            ended = run.pids("trainer")  # the others end with this one, but may take a moment
            os.kill(pid, signal.SIGKILL)
            told(
                f"seed {SEED}: kill {kill} of {KILLS}: rank {rank}, {life:.1f} s after its "
                f"{'start' if starting else 'first step'}; epoch {newest(run)[0]}, step {newest(run)[1]}"
            )
        run.succeed(600)
        counted = check_ledger(run, steps=STEPS, groups_per_step=RANKS_GROUPS)
        assert counted["leased"] == 0
        assert [record["step"] for record in run.metrics()] == list(range(1, STEPS + 1))
        told(f"seed {SEED}: {STEPS} steps, groups {dict(counted)}, trainer starts {starts(run.directory)}")


def newest(run: LocalRun) -> tuple[int, int]:
    """Epoch and number of the newest step."""
    path = run.directory / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    if not whole:
        return 0, 0
    record = json.loads(whole.rpartition("\n")[2])
    return record["epoch"], record["step"]


def wait(run: LocalRun, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Wait for some time, or less; the run must not end meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        assert run.process.poll() is None, f"the run is over (seed {SEED})\n{run.logs()}"
        time.sleep(0.05)


def told(line: str) -> None:
    """For whoever watches: `pytest -s`."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def starts(directory: Path) -> int:
    """How often the trainer was started."""
    return (directory / "logs" / "trainer.log").read_text().count("--- trainer: start ")
