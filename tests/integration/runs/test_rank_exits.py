"""A run whose trainer has two ranks ends with what its ranks found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.runs import local_run, rank_pid, ranks_job

ENGINE = "fsdp2"
pytestmark = pytest.mark.timeout(300)


def test_bad_input_of_a_trainer_ends_the_run_at_once_with_exit_code_two(letters_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    job = ranks_job(letters_model, ENGINE, steps=8)
    job["spec"]["checkpoint"]["resumeFrom"] = str(tmp_path / "empty")
    with local_run(job, tmp_path) as run:
        assert run.wait(120) == 2, run.logs()
        printed = run.printed()
        assert "trainer: ended with exit code 2\n" in printed
        assert "rank 0 failed, with exit code 2: checkpoint.resume_from" in printed
        assert "restart" not in printed
        assert "Traceback" not in run.logs(1000)


def test_a_crash_of_a_rank_is_not_taken_for_bad_input(letters_model: Path, tmp_path: Path) -> None:
    job = ranks_job(letters_model, ENGINE, steps=8)
    job["spec"]["trainer"]["maxRestarts"] = 1
    with local_run(job, tmp_path) as run:
        killed = rank_pid(run, 1)
        os.kill(killed, signal.SIGKILL)
        os.kill(rank_pid(run, 1, but={killed}), signal.SIGKILL)
        assert run.wait(120) == 1, run.logs()
        printed = run.printed()
        assert "trainer: ended with exit code 137; restart 1 of 1" in printed
        assert "trainer: ended with exit code 137 (after 1 restart)" in printed
        assert "rank 1 failed, by SIGKILL" in printed
