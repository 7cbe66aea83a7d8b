"""A run is stopped in order, looked at, and gone on with."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.runs import check_ledger, local_run, sort_letters_job, started


def inflight(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inflight_runtime", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on_from_there(letters_model: Path, tmp_path: Path) -> None:
    steps = 40
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
        again.succeed()
        metrics = again.metrics()
        assert [record["step"] for record in metrics] == list(range(1, steps + 1))
        assert {record["epoch"] for record in metrics[stopped:]} == {2}
        check_ledger(again, steps=steps, groups_per_step=4)
    assert (run.directory / "checkpoints" / f"step-{steps:08d}" / "model" / "config.json").exists()
