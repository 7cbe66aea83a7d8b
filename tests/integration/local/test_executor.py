"""Whole runs by the local executor, with real processes whose roles are stubs."""

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE_S = 40.0
INFLIGHT = [sys.executable, str(Path(__file__).with_name("stub_inflight.py"))]
JOB = """
apiVersion: inflight.dev/v1alpha1
kind: RLTrainingJob
metadata: {name: stubs}
spec:
  model: {source: model}
  environment: {entrypoint: "nothing:Nothing"}
  algorithm: {steps: 20, promptsPerStep: 2, groupSize: 2}
  sampling: {maxTokens: 8}
  inference: {engine: reference, replicas: 1}
"""


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Playground:
    """A directory with a job in which runs of stub roles take place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_dir = path / "run"
        (path / "model").mkdir()
        numbers = {"max_position_embeddings": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
        (path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **numbers}))
        (path / "job.yaml").write_text(JOB)
        self.misbehave()
        self.started: list[subprocess.Popen[str]] = []

    def misbehave(self, **behaviour: str) -> None:
        named = {name.replace("_", "-"): text for name, text in behaviour.items()}
        (self.path / "behaviour.json").write_text(json.dumps(named))

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        process = subprocess.Popen([*INFLIGHT, *arguments], cwd=self.path, text=True, start_new_session=True, **options)
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start("run", "job.yaml", "--run-dir", "run", *arguments)
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output

    def order(self) -> list[str]:
        path = self.run_dir / "order.txt"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self) -> list[int]:
        return [int(line.split()[-1]) for line in self.order() if " up " in line]

    def signals(self) -> list[str]:
        return [line.removesuffix(" SIGTERM") for line in self.order() if line.endswith("SIGTERM")]

    def wait_until_all_are_up(self) -> None:
        until(lambda: len(self.pids()) >= 4, "four roles")


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    made = Playground(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not any(map(is_running, made.pids())), "the end of every role")


def test_a_run_to_the_end_stops_the_others_in_order_and_says_where_everything_is(playground: Playground) -> None:
    code, output = playground.run()
    assert code == 0, output
    assert playground.signals() == ["actor-0", "inference-0", "coordinator"]
    assert "stubs: succeeded" in output
    assert re.search(r"steps +20 of 20 in 0:\d\d", output)
    assert re.search(r"reward +0\.275 over the first steps, 0\.775 over the last", output)
    assert "next: inflight samples run --best" in output
    assert {path.name for path in (playground.run_dir / "logs").iterdir()} == {
        "actor-0.log",
        "coordinator.log",
        "inference-0.log",
        "trainer.log",
    }
    assert stat.S_IMODE((playground.run_dir / "token").stat().st_mode) == 0o600
    assert not any(map(is_running, playground.pids()))


def test_plain_lines_tell_the_course_of_a_run_without_a_terminal(playground: Playground) -> None:
    _, output = playground.run("--set", "spec.algorithm.steps=100")
    assert "\x1b" not in output
    lines = output.splitlines()
    assert lines[0] == "[0:00] run directory: run"
    assert any(re.fullmatch(r"\[\d:\d\d\] inference-0: ready", line) for line in lines)
    pattern = r"\[\d:\d\d\] step \d+/100  reward 0\.\d{3}  staleness 1\.50  .*tokens/s 4,321  servers 1/1 at v0.*"
    assert any(re.fullmatch(pattern, line) for line in lines), output


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_everything_in_order_with_a_checkpoint(
    playground: Playground, signum: signal.Signals, code: int
) -> None:
    playground.misbehave(trainer="wait")
    process = playground.start("run", "job.yaml", "--run-dir", "run")
    playground.wait_until_all_are_up()
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, output
    assert playground.signals() == ["actor-0", "trainer", "inference-0", "coordinator"]
    assert f"stubs: interrupted\nstopped by {signum.name}" in output
    assert re.search(r"checkpoint +run/checkpoints/step-00000001", output)
    assert "next: inflight run --resume run" in output
    assert not any(map(is_running, playground.pids()))


def test_a_second_signal_kills_at_once(playground: Playground) -> None:
    playground.misbehave(trainer="ignore SIGTERM")
    process = playground.start("run", "job.yaml", "--run-dir", "run")
    playground.wait_until_all_are_up()
    process.send_signal(signal.SIGINT)
    until(lambda: "trainer" in playground.signals(), "SIGTERM of the trainer")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE_S)  # well below the trainer's grace time
    assert process.returncode == 130, output
    assert "inference-0" not in playground.signals()
    assert not any(map(is_running, playground.pids()))


def test_no_role_outlives_an_executor_that_is_killed(playground: Playground) -> None:
    playground.misbehave(trainer="wait")
    process = playground.start("run", "job.yaml", "--run-dir", "run", stdout=subprocess.DEVNULL)
    playground.wait_until_all_are_up()
    process.kill()
    process.wait()
    until(lambda: not any(map(is_running, playground.pids())), "the end of every role")
    assert (playground.run_dir / "checkpoints" / "LATEST").exists()


def test_a_run_that_was_declared_failed_ends_with_the_reason(playground: Playground) -> None:
    playground.misbehave(actor_0="declare the run failed", trainer="wait")
    code, output = playground.run()
    assert code == 1
    assert "stubs: failed\nthe environment failed 8 times in a row: KeyError: 'letters'" in output


def test_a_server_that_never_gets_ready_ends_the_run_with_its_last_lines(playground: Playground) -> None:
    playground.misbehave(inference_0="never ready", trainer="wait")
    code, output = playground.run("--ready-timeout", "2")
    assert code == 1
    assert "inference-0: not ready within 2 s" in output
    assert "| RuntimeError: no room for the KV cache" in output
    assert playground.signals()[-1] == "coordinator"


def test_a_role_that_cannot_use_its_input_ends_the_run_at_once_with_exit_code_two(playground: Playground) -> None:
    playground.misbehave(trainer="bad input")
    code, output = playground.run()
    assert code == 2
    assert "trainer: ended with exit code 2\n" in output
    assert "| cannot train: there is no whole checkpoint" in output
    assert "restart" not in output


def test_a_deadline_in_the_job_ends_the_run(playground: Playground) -> None:
    playground.misbehave(trainer="wait")
    code, output = playground.run("--set", "spec.lifecycle.activeDeadlineSeconds=3")
    assert code == 1
    assert "spec.lifecycle.activeDeadlineSeconds: 3 s are over" in output
    assert (playground.run_dir / "checkpoints" / "LATEST").exists()


def test_killed_roles_come_back_servers_at_a_fresh_port_and_the_coordinator_at_its_own(playground: Playground) -> None:
    playground.misbehave(trainer="wait")
    process = playground.start("run", "job.yaml", "--run-dir", "run")
    playground.wait_until_all_are_up()
    config = playground.run_dir / "config"
    before = {
        name: json.loads((config / f"{name}.json").read_text())["port"] for name in ("inference-0", "coordinator")
    }
    pids = {line.split()[0]: int(line.split()[-1]) for line in playground.order() if " up " in line}
    for count, name in ((5, "inference-0"), (6, "coordinator"), (7, "actor-0"), (8, "trainer")):
        os.kill(pids[name], signal.SIGKILL)
        until(lambda count=count: len(playground.pids()) == count, f"another life of {name}")
    after = {name: json.loads((config / f"{name}.json").read_text())["port"] for name in before}
    assert after["coordinator"] == before["coordinator"]
    assert after["inference-0"] != before["inference-0"]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert re.search(r"restarts +coordinator 1, inference-0 1, trainer 1, actor-0 1", output), output


def test_a_stopped_run_goes_on_in_its_directory_and_a_live_one_is_left_alone(playground: Playground) -> None:
    playground.misbehave(trainer="wait")
    process = playground.start("run", "job.yaml", "--run-dir", "run", "--set", "spec.algorithm.steps=30")
    playground.wait_until_all_are_up()
    token = (playground.run_dir / "token").read_text()
    other = playground.start("run", "--resume", "run")
    output, _ = other.communicate(timeout=DEADLINE_S)
    assert other.returncode == 2
    assert "belongs to a run that is still going on" in output
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)

    playground.misbehave()
    resumed = playground.start("run", "--resume", "run")
    output, _ = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, output
    assert "30 of 30" in output  # the override of the first start still holds
    assert (playground.run_dir / "token").read_text() == token

    again = playground.start("run", "--resume", "run")
    output, _ = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 2
    assert "the run in run is over (succeeded); start a new one" in output


def test_runs_without_a_directory_of_their_own_get_one_and_latest_points_to_it(playground: Playground) -> None:
    process = playground.start("run", "job.yaml")
    # The stubs look for behaviour.json beside the run directory.
    (playground.path / "runs").mkdir(exist_ok=True)
    (playground.path / "runs" / "behaviour.json").write_text("{}")
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    latest = playground.path / "runs" / "latest"
    assert latest.is_symlink()
    assert re.fullmatch(r"stubs-\d{8}-\d{6}", str(latest.readlink()))
    assert f"next: inflight samples runs/{latest.readlink()} --best" in output


def test_status_is_live_while_a_run_goes_on_and_from_its_files_afterwards(playground: Playground) -> None:
    playground.misbehave(trainer="wait")
    process = playground.start("run", "job.yaml", "--run-dir", "run")
    playground.wait_until_all_are_up()
    live = playground.start("status", "run")
    output, _ = live.communicate(timeout=DEADLINE_S)
    assert live.returncode == 0
    assert re.search(r"inference-0 +READY +1\.0 +8 ms +21 ms +12/64", output)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    over = playground.start("status", "run")
    output, _ = over.communicate(timeout=DEADLINE_S)
    assert "stubs  not running" in output
    assert "go on: inflight run --resume run" in output


def test_the_live_view_draws_on_a_terminal_and_leaves_it_as_it_was(playground: Playground) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    process = playground.start(
        "run", "job.yaml", "--run-dir", "run", "--set", "spec.algorithm.steps=150",
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    output = b""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.1)[0]:
            continue
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(ours)
    assert process.wait(timeout=DEADLINE_S) == 0
    text = output.decode(errors="replace")
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is hidden for good"
    assert "\x1b[1A" in text, "nothing was drawn in place"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"step \d+/150 +\d+%", plain)
    assert re.search(r"inference-0 +READY +1\.0 +8 ms +21 ms +12/64", plain)
    assert "stubs: succeeded" in plain
