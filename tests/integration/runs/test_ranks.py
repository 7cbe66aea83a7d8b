"""Whole runs whose trainer has two ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.runs import RANKS_GROUPS as GROUPS
from support.runs import check_ledger, local_run, rank_pid, ranks_job, started

pytestmark = pytest.mark.timeout(900)


# Ten kills of each engine are in test_ranks_killed.py.
@pytest.mark.parametrize(("engine", "rank"), [("fsdp2", 1), ("deepspeed", 0)])
def test_kill_9_of_one_rank_and_the_run_completes(engine: str, rank: int, letters_model: Path, tmp_path: Path) -> None:
    steps = 16
    with local_run(ranks_job(letters_model, engine, steps), tmp_path) as run:
        run.wait_for_step(6)
        os.kill(rank_pid(run, rank), signal.SIGKILL)
        run.succeed(300)
        counted = check_ledger(run, steps=steps, groups_per_step=GROUPS)
        assert counted["leased"] == 0
        metrics = run.metrics()
        assert [record["step"] for record in metrics] == list(range(1, steps + 1))
        assert {record["epoch"] for record in metrics} == {1, 2}


# A signal is the loop's business, whatever the engine (test_faults.py has both): a whole run of each kind is enough.
@pytest.mark.parametrize("engine", ["fsdp2"])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(engine: str, letters_model: Path, tmp_path: Path) -> None:
    steps = 16
    job = ranks_job(letters_model, engine, steps)
    job["spec"]["checkpoint"]["everySteps"] = 0
    with local_run(job, tmp_path) as run:
        run.wait_for_step(4)
        os.kill(rank_pid(run, 1), signal.SIGTERM)
        run.succeed(300)
        assert len(run.metrics()) == steps
        log = (run.directory / "logs" / "trainer.log").read_text()
        resumed = [line for line in log.splitlines() if "begins at step" in line]
        assert len(resumed) == 2, log
        assert "begins at step 0 " not in resumed[1], "the steps before the signal are lost"
        check_ledger(run, steps=steps, groups_per_step=GROUPS)


@pytest.mark.parametrize("engine", ["deepspeed"])
def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on_from_there(
    engine: str, letters_model: Path, tmp_path: Path
) -> None:
    steps = 16
    job = ranks_job(letters_model, engine, steps)
    job["spec"]["checkpoint"]["everySteps"] = 0
    with local_run(job, tmp_path) as run:
        run.wait_for_step(4)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.logs()
        stopped = len(run.metrics())
        assert 4 <= stopped < steps
        assert (run.directory / "checkpoints" / f"step-{stopped:08d}").is_dir(), run.logs()
        assert not run.pids("trainer")
    with started(run.directory, tmp_path / "resumed.txt", "run", "--resume", str(run.directory)) as again:
        again.succeed(300)
        assert [(record["epoch"], record["step"]) for record in again.metrics()] == [
            (1 if step <= stopped else 2, step) for step in range(1, steps + 1)
        ]
        check_ledger(again, steps=steps, groups_per_step=GROUPS)
