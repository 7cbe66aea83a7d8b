"""A run is stopped in order, looked at, and gone on with."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from inflight_runtime.local.rundir import RunDirectory
from support.runs import check_ledger, local_run, sort_letters_job, started


def inflight(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inflight_runtime", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def looking(output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on for as long as the run does."""
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "inflight_runtime", *words], stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def until_somebody_runs(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while not RunDirectory(directory).is_alive():
        assert time.monotonic() < deadline, f"nobody runs {directory}"
        time.sleep(0.1)


def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on_from_there(letters_model: Path, tmp_path: Path) -> None:
    steps = 24
    job = sort_letters_job(letters_model, steps=steps, promptsPerStep=4, maxStaleness=1)
    job["spec"]["logging"] = {"rolloutsPerStep": 1000}
    with local_run(job, tmp_path) as run:
        run.wait_for_step(8)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.logs()
        stopped = len(run.metrics())
        assert 8 <= stopped < steps
        assert (run.directory / "checkpoints" / f"step-{stopped:08d}").is_dir(), run.logs()
        assert f"--resume {run.directory}" in run.printed()

    text = inflight("status", str(run.directory))
    assert f"{stopped}" in text
    shown = inflight("samples", str(run.directory), "--best", "-n", "3")
    assert "sort:" in shown
    assert "1." in shown, "the versions of the answers are not shown"

    with started(run.directory, tmp_path / "again.txt", "run", "--resume", str(run.directory)) as again:
        until_somebody_runs(run.directory)
        with looking(tmp_path / "status.txt", "status", "-w", str(run.directory)) as watching:
            with looking(tmp_path / "logs.txt", "logs", str(run.directory), "trainer", "-f") as following:
                again.succeed()
                assert following.wait(20) == 0
            assert watching.wait(20) == 0
        told = (tmp_path / "status.txt").read_text()
        assert "step " in told
        assert "sort-letters  succeeded" in told
        lines = (tmp_path / "logs.txt").read_text().splitlines()
        assert f"all {steps} steps are done" in lines[-1]
        assert all(line.startswith("trainer | ") for line in lines)
        metrics = again.metrics()
        assert [record["step"] for record in metrics] == list(range(1, steps + 1))
        assert {record["epoch"] for record in metrics[stopped:]} == {2}
        check_ledger(again, steps=steps, groups_per_step=4)
    assert (run.directory / "checkpoints" / f"step-{steps:08d}" / "model" / "config.json").exists()
