"""Ctrl-C before a run has begun, while the job is still being checked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 60.0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_while_the_environment_is_checked_ends_it_and_the_command(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    lines = (
        "import os, pathlib, time",
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))",
        "time.sleep(600)",
    )
    (tmp_path / "slow.py").write_text("\n".join(lines))
    job = {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "metadata": {"name": "slow"},
        "spec": {
            "model": {"source": "model"},
            "environment": {"entrypoint": "slow:Slow"},
            "algorithm": {"steps": 1},
            "sampling": {"maxTokens": 8},
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-c", "from inflight_runtime.cli import main; main()", "run", "job.yaml"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
    pid_file = tmp_path / "pid"
    end = time.monotonic() + DEADLINE_S
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, output
    assert "Traceback" not in output
    child = int(pid_file.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "runs").exists()
