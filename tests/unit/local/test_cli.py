"""The ``inflight`` command: what is refused before anything starts, and what it reads back."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from inflight_runtime.cli import app
from inflight_runtime.config import checks
from inflight_runtime.local.rundir import RunDirectory, RunRecord

NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without a tensor."""
ENVIRONMENT = """
from inflight_runtime.actor import SingleTurnEnvironment

class Letters(SingleTurnEnvironment):
    def __init__(self):
        self.problems = ["a", "b"]

    def messages(self, problem):
        return [{"role": "user", "content": problem}]

    def reward(self, problem, text):
        return 1.0

class Raises(Letters):
    def __init__(self):
        raise RuntimeError("no licence")
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job that can run here; its files lie in the current directory."""
    monkeypatch.chdir(tmp_path)
    model = Path("model")
    model.mkdir()
    numbers = {"max_position_embeddings": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **numbers}))
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    (model / "tokenizer.json").write_text("{}")
    Path("letters.py").write_text(ENVIRONMENT)
    return {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "metadata": {"name": "letters"},
        "spec": {
            "model": {"source": "model"},
            "environment": {"entrypoint": "letters:Letters"},
            "algorithm": {"steps": 10, "promptsPerStep": 2, "groupSize": 4},
            "sampling": {"maxTokens": 8},
        },
    }


@pytest.fixture
def trusted_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about something else: the environment is not loaded."""
    monkeypatch.setattr(checks, "check_environment", lambda *_: [])


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write(job: dict[str, Any]) -> None:
    Path("job.yaml").write_text(json.dumps(job))


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(job: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for name in above:
            job = job.setdefault(name, {})
        job[last] = value

    return change


BAD_JOBS = [
    pytest.param(
        put("spec.algorithm.groupsize", 8),
        r"spec\.algorithm\.groupsize: unknown field \(got 8\); did you mean groupSize\?",
        id="unknown field",
    ),
    pytest.param(
        put("spec.algorithm.steps", "many"),
        r'spec\.algorithm\.steps: must be a whole number \(got "many"\); expected: Optimizer steps',
        id="wrong type",
    ),
    pytest.param(
        put("spec.trainer", {"microBatchTokens": 16}),
        r"spec\.trainer\.microBatchTokens: cannot hold one group: 4 attempts .* \(got 16\); raise it to 33",
        id="a group over the token budget",
    ),
    pytest.param(
        put("spec.sampling.maxTokens", 128),
        r"spec\.sampling\.maxTokens: leaves no room for a prompt: .* 128 tokens.*\(got 128\); set it below 128",
        id="prompt and answer over the model's length",
    ),
    pytest.param(
        put("spec.sampling.topP", 0.9),
        r"spec\.sampling\.topP: .*biases the importance ratio.* \(got 0\.9\); remove topP",
        id="nucleus sampling",
    ),
    pytest.param(
        put("spec.inference", {"engine": "sglang"}),
        r'spec\.inference\.engine: must be vllm or reference \(got "sglang"\)',
        id="an engine that does not exist",
    ),
    pytest.param(
        put("spec.model.source", "."),
        r'spec\.model\.source: .* is not a model .* lacks config\.json.* \(got "\."\); did you mean its subdirectory',
        id="a directory that is no model",
    ),
    pytest.param(
        put("spec.model.source", "nowhere"),
        r'spec\.model\.source: there is no directory .*nowhere \(got "nowhere"\); give the directory of a model',
        id="a directory that is not there",
    ),
    pytest.param(put("kind", "Job"), r'kind: must be RLTrainingJob \(got "Job"\); give the file', id="another kind"),
]


@pytest.mark.usefixtures("trusted_environment")
@pytest.mark.parametrize(("change", "message"), BAD_JOBS)
@pytest.mark.parametrize("command", ["run", "validate", "render"])
def test_a_bad_job_is_refused_with_field_value_reason_and_remedy(
    job: dict[str, Any], command: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change(job)
    write(job)
    result = invoke(command, "job.yaml")
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.startswith("inflight: job.yaml")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not Path("runs").exists()


@pytest.mark.usefixtures("trusted_environment")
def test_all_problems_are_told_at_once(job: dict[str, Any]) -> None:
    put("spec.algorithm.groupsize", 8)(job)
    put("spec.sampling.temperature", 0)(job)
    write(job)
    result = invoke("run", "job.yaml")
    assert result.exit_code == 2
    assert "job.yaml: 2 problems" in result.stderr
    assert "groupsize" in result.stderr
    assert "spec.sampling.temperature: must be above 0.0 (got 0); choose a value" in result.stderr


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("nothing:Letters", r"spec\.environment\.entrypoint: there is no module 'nothing'.*got \"nothing:Letters\""),
        ("letters:Raises", r"spec\.environment.*RuntimeError: no licence"),
    ],
)
def test_an_environment_that_does_not_load_is_refused(job: dict[str, Any], entrypoint: str, message: str) -> None:
    put("spec.environment.entrypoint", entrypoint)(job)
    write(job)
    result = invoke("run", "job.yaml")
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("runs").exists()


@pytest.mark.usefixtures("trusted_environment")
def test_an_engine_that_is_not_installed_is_refused(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = checks._installed
    monkeypatch.setattr(checks, "_installed", lambda module: module != "vllm" and installed(module))
    write(job)
    result = invoke("run", "job.yaml")
    assert result.exit_code == 2
    assert "spec.inference.engine: the Python package vllm is not installed here" in result.stderr


@pytest.mark.usefixtures("trusted_environment")
def test_a_port_that_is_in_use_is_refused_and_no_run_directory_is_made(job: dict[str, Any]) -> None:
    write(job)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("run", "job.yaml", "--coordinator-port", str(port))
    assert result.exit_code == 2
    pattern = rf"--coordinator-port: port {port} on 127\.0\.0\.1 .*in use.* \(got {port}\); end what uses it, or choose"
    assert re.search(pattern, result.stderr), result.stderr
    assert not Path("runs").exists()


@pytest.mark.usefixtures("trusted_environment")
def test_a_run_directory_that_is_not_empty_is_left_alone(job: dict[str, Any]) -> None:
    write(job)
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("precious")
    result = invoke("run", "job.yaml", "--run-dir", "mine")
    assert result.exit_code == 2
    assert "mine is not empty; name another directory" in result.stderr
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give either a job file or --resume"),
        (["run", "job.yaml", "--resume", "runs/latest"], "give either a job file or --resume"),
        (["run", "--resume", "x", "--run-dir", "y"], "--run-dir: a resumed run keeps its directory"),
        (["run", "--resume", "no-run"], "no-run is no run directory"),
        (["status", "no-run"], "no-run is no run directory"),
        (["status", "no-run"], "; a job in a cluster: inflight status rltj/no-run"),
        (["status", "--watch", "no-run"], "no-run is no run directory"),
        (["logs", "no-run"], "no-run is no run directory"),
        (["logs", "trainer"], "; a job in a cluster: inflight logs rltj/trainer"),
        (["logs", "--previous"], "--previous: is for a job in a cluster; a local log holds all starts"),
        (["logs", "rltj/x", "-f", "-p"], "--previous: excludes --follow"),
        (["status", "-n", "x", "-A"], "--all-namespaces: excludes --namespace"),
        (["status", "runs/x", "-n", "y"], "runs/x: there are only jobs to look at; write rltj/x"),
        (["samples", "no-run"], "no-run is no run directory"),
        (["samples", "--best", "--worst"], "--best: excludes --worst"),
        (["run", "no-such-file.yaml"], "no-such-file.yaml: cannot be read: no such file or directory"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("trusted_environment")
def test_a_good_job_is_valid(job: dict[str, Any]) -> None:
    write(job)
    result = invoke("validate", "job.yaml")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"job\.yaml: letters is valid and can run on this machine \((cpu|cuda)\)\n", result.stdout)


@pytest.mark.usefixtures("trusted_environment")
def test_render_prints_the_config_of_every_process_with_overrides_in_it(job: dict[str, Any]) -> None:
    put("spec.inference", {"replicas": 2})(job)
    write(job)
    result = invoke(
        "render", "job.yaml", "--set", "spec.algorithm.steps=77", "--set", "spec.trainer.optimizer.eps=1e-6"
    )
    assert result.exit_code == 0, result.stderr
    configs = json.loads(result.stdout)
    assert list(configs) == ["coordinator", "inference-0", "inference-1", "actor-0", "trainer"]
    assert configs["coordinator"]["steps"] == configs["trainer"]["steps"] == 77
    assert configs["trainer"]["optimizer"]["eps"] == 1e-6
    ports = [configs[name]["port"] for name in ("coordinator", "inference-0", "inference-1")]
    assert len(set(ports)) == 3
    one = invoke("render", "job.yaml", "--role", "trainer")
    assert json.loads(one.stdout)["steps"] == 10
    wrong = invoke("render", "job.yaml", "--role", "trainr")
    assert wrong.exit_code == 2
    assert "--role: there is no such process (got trainr); choose one of coordinator, inference-0" in wrong.stderr


def test_render_prints_the_objects_of_a_cluster_without_one(job: dict[str, Any]) -> None:
    put("spec.model", {"source": "example-org/not-here"})(job)
    put("spec.environment.configMap", "letters-code")(job)
    write(job)
    result = invoke("render", "job.yaml", "--kubernetes", "--set", "spec.trainer.maxRestarts=9")
    assert result.exit_code == 0, result.stderr
    objects = list(yaml.safe_load_all(result.stdout))
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert by_name["JobSet", "letters-t"]["spec"]["failurePolicy"]["maxRestarts"] == 9
    assert ("Deployment", "letters-actor") in by_name
    assert {item["metadata"]["namespace"] for item in objects} == {"default"}
    wrong = invoke("render", "job.yaml", "--kubernetes", "--role", "trainer")
    assert (wrong.exit_code, "--role: excludes --kubernetes" in wrong.stderr) == (2, True)
    put("spec.actors", {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}})(job)
    write(job)
    overlay = invoke("render", "job.yaml", "--kubernetes")
    assert overlay.exit_code == 2
    assert "podTemplate.spec.containers[0]: has no name" in overlay.stderr


def test_render_for_a_cluster_names_a_setting_that_cannot_be(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(job)
    monkeypatch.setenv("INFLIGHT_RUN_AS", "root")
    result = invoke("render", "job.yaml", "--kubernetes")
    assert result.exit_code == 2
    assert "INFLIGHT_RUN_AS='root'" in result.stderr


@pytest.mark.usefixtures("trusted_environment")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set: is not path=value (got steps); write --set spec.algorithm.steps=100"),
        ("spec..steps=1", "--set: is not path=value"),
        ("spec.algorithm.steps.x=1", "--set: spec.algorithm.steps is a value and has no fields"),
        ("spec.algorithm.stepz=5", "spec.algorithm.stepz: unknown field (got 5); did you mean steps?"),
        ("spec.algorithm.steps=[", "--set spec.algorithm.steps:1: is not valid YAML"),
    ],
)
def test_a_bad_override_is_refused(job: dict[str, Any], override: str, message: str) -> None:
    write(job)
    result = invoke("validate", "job.yaml", "--set", override)
    assert result.exit_code == 2
    assert message in result.stderr, result.stderr


@pytest.mark.usefixtures("trusted_environment")
def test_null_takes_a_field_out_and_a_missing_section_is_made(job: dict[str, Any]) -> None:
    put("spec.sampling.topP", 1)(job)
    write(job)
    overrides = ["--set", "spec.sampling.topP=null", "--set", "spec.logging.rolloutsPerStep=3"]
    result = invoke("render", "job.yaml", "--role", "trainer", *overrides)
    assert json.loads(result.stdout)["rollouts_per_step"] == 3


def finished_run(path: Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create("job", RunRecord("letters", "/job.yaml", ()))
    line = {"problem": 0, "prompt": "sort:cab", "parts": {}, "versions": ["1.0"], "status": "ok", "finish": "stop"}
    records = [
        {**line, "step": step, "group": step * 10, "attempt": number, "text": f"answer{step}{number}", "reward": reward}
        for step in (1, 2)
        for number, reward in enumerate((0.25, 1.0))
    ]
    directory.rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    directory.metrics.write_text('{"step": 2, "reward_mean": 0.625, "reward/exact": 0.5}\n')
    return directory


def test_samples_shows_answers_by_reward(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    result = invoke("samples", str(tmp_path / "run"), "-n", "1")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[:4] == [
        "step 2, group 20, problem 0   2 answers, mean reward 0.625",
        "sort:cab",
        "1.000  answer21   [v1.0]",
        "0.250  answer20   [v1.0]",
    ]
    assert "answer1" not in result.stdout
    first = invoke("samples", str(tmp_path / "run"), "--step", "1")
    assert "answer11" in first.stdout
    assert "answer21" not in first.stdout
    none = invoke("samples", str(tmp_path / "run"), "--step", "3")
    assert none.exit_code == 1
    assert "no rollouts of step 3" in none.stderr


def test_status_of_a_run_that_is_over_comes_from_its_files(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    result = invoke("status", str(tmp_path / "run"))
    assert result.exit_code == 0
    assert "letters  not running" in result.stdout
    assert "last step 2  reward 0.625  exact 0.500" in result.stdout


def test_the_command_line_loads_neither_torch_nor_an_engine() -> None:
    code = """
import sys
import inflight_runtime.cli, inflight_runtime.local.executor, inflight_runtime.local.prepare
import inflight_runtime.local.status, inflight_runtime.local.summary, inflight_runtime.local.samples
print(sorted({"torch", "vllm", "transformers", "deepspeed", "datasets", "tensorboardX"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout == "[]\n"


def test_logs_of_the_newest_run_need_no_more_than_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = finished_run(tmp_path / "runs" / "latest")
    directory.log("trainer").write_text("one\ntwo\n")
    directory.log("actor-0").write_text("three\n")
    assert invoke("logs").stdout == "actor-0 | three\ntrainer | one\ntrainer | two\n"
    assert invoke("logs", "trainer", "--tail", "1").stdout == "trainer | two\n"
    assert invoke("logs", "runs/latest", "actor", "-f").stdout == "actor-0 | three\n"
    assert "has no log of inference; there are actor-0, trainer" in invoke("logs", "inference").stderr
    assert invoke("status", "-w").exit_code == 1  # nobody runs it, and it has not succeeded


def test_a_cluster_needs_no_more_than_its_extra_and_says_so_when_that_is_missing() -> None:
    code = """
import sys
import inflight_runtime.cli, inflight_runtime.cluster.status, inflight_runtime.cluster.logs
print(sorted({"torch", "numpy", "msgpack", "psutil", "inflight_operator"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout == "[]\n"
    code = """
import sys
sys.modules["kubernetes"] = None
sys.argv = ["inflight", "status", "rltj"]
from inflight_runtime.cli import main
main()
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert output.returncode == 2
    assert output.stderr == (
        "inflight: the Python package kubernetes is not installed here; for jobs in a cluster install this "
        "project with its extra: pip install '.[cluster]'\n"
    )


def test_an_answer_at_once_needs_no_web_client() -> None:
    code = """
import sys
import inflight_runtime.cli, inflight_runtime.local.prepare
print(sorted({"aiohttp", "numpy", "msgpack"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert output.stdout == "[]\n"
