"""What is found out about a machine before a run: one row per cause, with the field and words of the message."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inflight_runtime.api import JobError, Problem, RLTrainingJob, validate_job
from inflight_runtime.config import checks
from inflight_runtime.config.model_files import ModelFacts
from support.tiny_models import make_tiny_model

ENVIRONMENT = """\
from inflight_runtime.actor import SingleTurnEnvironment

class Sort(SingleTurnEnvironment):
    def __init__(self, letters=3):
        self.problems = ["cab"]
        self.eval_problems = ["abc", "bca"]

    def messages(self, problem):
        return problem

    def reward(self, problem, answer):
        return 1.0
"""


def make_job(**sections: Any) -> RLTrainingJob:
    spec: dict[str, Any] = {
        "model": {"source": "model"},
        "environment": {"entrypoint": "environment:Sort"},
        "algorithm": {"steps": 100},
        "sampling": {"maxTokens": 6},
        "inference": {"engine": "reference"},
    }
    suspend = sections.pop("suspend", False)
    for name, fields in sections.items():
        spec[name] = {**spec.get(name, {}), **fields}
    data = {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "metadata": {"name": "sort-letters"},
        "spec": {**spec, "suspend": suspend},
    }
    return validate_job(data, "test")


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model", "qwen2")
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    return tmp_path


def only(problems: list[Problem], field: str, words: str) -> None:
    assert [problem.field for problem in problems] == [field], problems
    assert words in str(problems[0])
    assert problems[0].remedy


def test_a_sound_job_has_no_problems(job_dir: Path) -> None:
    assert checks.check_local_run(make_job(), job_dir, "cpu") == []
    assert checks.check_local_run(make_job(evaluation={"everySteps": 1, "prompts": 2}), job_dir, "cpu") == []


def test_several_problems_are_found_at_once(job_dir: Path) -> None:
    job = make_job(suspend=True, sampling={"maxTokens": 100_000}, environment={"entrypoint": "nowhere:Sort"})
    found = [problem.field for problem in checks.check_local_run(job, job_dir, "cpu")]
    assert found == ["spec.suspend", "spec.sampling.maxTokens", "spec.environment.entrypoint"]


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"suspend": True}, "spec.suspend", "a suspended job does not run"),
        ({"trainer": {"engine": "fsdp2", "nodes": 2}}, "spec.trainer.nodes", "a local run has one machine"),
        ({"model": {"source": None, "volume": {"claimName": "m"}}}, "spec.model.volume", "in a cluster only"),
        ({"inference": {"replicas": 0}}, "spec.inference.replicas", "set it to 1 or more"),
        ({"actors": {"replicas": 0}}, "spec.actors.replicas", "set it to 1 or more"),
    ],
)
def test_what_only_a_cluster_can_do_is_refused(sections: dict[str, Any], field: str, words: str) -> None:
    only(checks.check_runs_locally(make_job(**sections)), field, words)


def test_nccl_and_a_split_model_need_gpus() -> None:
    nccl = make_job(weightSync={"transport": "nccl"})
    only(checks.check_transport(nccl, "cpu"), "spec.weightSync.transport", "set it to auto")
    assert checks.check_transport(nccl, "cuda") == []
    split = make_job(inference={"engine": "vllm", "tensorParallel": 2})
    only(checks.check_transport(split, "cpu"), "spec.inference.tensorParallel", "set it to 1")


def test_each_rank_of_the_trainer_needs_a_gpu_of_its_own_where_there_are_gpus() -> None:
    job = make_job(trainer={"engine": "fsdp2", "processesPerNode": 3})
    only(checks.check_ranks(job, "cuda", 2), "spec.trainer.processesPerNode", "this machine has 2 (got 3); set it to 2")
    assert checks.check_ranks(job, "cuda", 3) == []
    assert checks.check_ranks(job, "cpu", 0) == []


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_engines_installed(make_job()) == []
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    vllm = make_job(inference={"engine": "vllm"})
    only(checks.check_engines_installed(vllm), "spec.inference.engine", "pip install vllm")
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    found = checks.check_engines_installed(make_job())
    assert [problem.field for problem in found] == ["spec.inference.engine", "spec.trainer.engine"]


def remove(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


def write(name: str, text: str, *, without: str = "") -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_text(text)
        if without:
            (model / without).unlink()

    return change


def nest(model: Path) -> None:
    inner = model / "snapshot"
    inner.mkdir()
    for path in list(model.iterdir()):
        if path.is_file():
            path.rename(inner / path.name)


def cut_off(name: str, missing_bytes: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        whole = (model / name).read_bytes()
        (model / name).write_bytes(whole[: max(20, len(whole) - missing_bytes)])

    return change


INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("config.json"), "it lacks config.json"),
        (remove("model.safetensors"), "it lacks weights (model.safetensors)"),
        (write("adapter_config.json", "{}", without="model.safetensors"), "it is a LoRA adapter"),
        (write("m.gguf", "", without="model.safetensors"), "it has a GGUF file"),
        (write("config.json", "{"), "it lacks a readable config.json"),
        (write("config.json", "{}"), "it lacks a config.json with a model_type"),
        (write("model.safetensors", POINTER), "it is a Git LFS pointer"),
        (write("model.safetensors", ""), "it is empty"),
        (write("model.safetensors", "weights, perhaps"), "it is cut off"),
        (cut_off("model.safetensors", 1), "it is cut off: "),
        (cut_off("model.safetensors", 100_000), "it is cut off: "),
        (write("model.safetensors", f"{chr(2)}{chr(0) * 7}[]"), "it is no safetensors file"),
        (write("model.safetensors.index.json", INDEX), "it lacks 2 of 2 weight files"),
        (write("model.safetensors.index.json", "{}"), "it lacks a readable model.safetensors.index.json"),
        (remove("tokenizer.json"), "lacks a tokenizer"),
        (write("tokenizer.json", POINTER), "the content of tokenizer.json (it is a Git LFS pointer)"),
        (nest, "did you mean its subdirectory snapshot?"),
    ],
)
def test_a_directory_that_is_no_model_is_told_what_it_lacks(
    job_dir: Path, change: Callable[[Path], None], words: str
) -> None:
    change(job_dir / "model")
    only(checks.check_model_files(make_job(), job_dir, "cpu"), "spec.model.source", words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./missing", "give the directory of a model, relative to the job file"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir"),
        ("environment.py", "give the directory that holds config.json"),
    ],
)
def test_a_source_that_is_no_directory_is_explained(job_dir: Path, source: str, words: str) -> None:
    only(checks.check_model_files(make_job(model={"source": source}), job_dir, "cpu"), "spec.model.source", words)


def test_a_model_that_a_script_beside_the_job_makes_is_made_first(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_dir / "make_model.py").touch()
    monkeypatch.chdir(job_dir.parent)
    job = make_job(model={"source": "./missing"})
    remedy = f"make it first: python {job_dir.name}/make_model.py"
    only(checks.check_model_files(job, job_dir, "cpu"), "spec.model.source", remedy)


def test_a_tokenizer_of_its_own_is_checked_under_its_own_field(job_dir: Path) -> None:
    (job_dir / "empty").mkdir()
    for tokenizer, words in [("missing", "there is no directory"), ("empty", "lacks a tokenizer")]:
        found = checks.check_model_files(make_job(model={"tokenizer": tokenizer}), job_dir, "cpu")
        only(found, "spec.model.tokenizer", words)
    (job_dir / "model" / "tokenizer.json").rename(job_dir / "empty" / "tokenizer.json")
    assert checks.check_model_files(make_job(model={"tokenizer": "empty"}), job_dir, "cpu") == []


FACTS = ModelFacts(max_length=128, layers=2, kv_heads=2, head_dim=32)


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"sampling": {"maxTokens": 128}}, "spec.sampling.maxTokens", "the model takes 128 tokens"),
        (
            {"sampling": {"maxTokens": 64}, "inference": {"engineArgs": {"max-model-len": 129}}},
            "spec.inference.engineArgs.max-model-len",
            "set it to 128 or less",
        ),
    ],
)
def test_lengths_that_do_not_fit_the_model_are_refused(sections: dict[str, Any], field: str, words: str) -> None:
    only(checks.check_lengths(make_job(**sections), FACTS), field, words)


def test_lengths_that_fit_pass_and_a_default_that_does_not_is_called_one() -> None:
    assert checks.check_lengths(make_job(sampling={"maxTokens": 127}), FACTS) == []
    data = make_job().to_wire()
    del data["spec"]["sampling"]
    only(checks.check_lengths(validate_job(data, "x"), FACTS), "spec.sampling.maxTokens", "(the default)")


def test_a_head_size_that_kills_vllm_on_a_cpu_is_refused() -> None:
    job = make_job(inference={"engine": "vllm"})
    small = ModelFacts(128, 2, 4, 16)
    only(checks.check_head_dim(job, small, "cpu"), "spec.model.source", "heads have size 16")
    assert checks.check_head_dim(job, small, "cuda") == []
    assert checks.check_head_dim(make_job(), small, "cpu") == []
    assert checks.check_head_dim(job, FACTS, "cpu") == []


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        only(checks.check_port_free("127.0.0.1", port, "--port"), "--port", f"port {port} on 127.0.0.1")
    assert checks.check_port_free("127.0.0.1", port, "--port") == []


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    job = make_job(checkpoint={"resumeFrom": "old"})
    only(checks.check_resume_from(job, tmp_path), "spec.checkpoint.resumeFrom", "there is no directory")
    (tmp_path / "old").mkdir()
    assert checks.check_resume_from(job, tmp_path) == []


@pytest.mark.parametrize(
    ("code", "args", "field", "words"),
    [
        ("", {}, "spec.environment.entrypoint", "has no class 'Sort'"),
        ("import nowhere_at_all", {}, "spec.environment.entrypoint", "needs 'nowhere_at_all', which is not installed"),
        ("raise ValueError('a; b')", {}, "spec.environment.entrypoint", "ValueError: a; b (environment.py:1"),
        ("import sys; sys.exit(3)", {}, "spec.environment.entrypoint", "ended the process (exit code 3)"),
        ("import os; os.kill(os.getpid(), 11)", {}, "spec.environment.entrypoint", "signal 11"),
        (ENVIRONMENT, {"leters": 3}, "spec.environment.args.leters", "did you mean 'letters'?"),
        (
            ENVIRONMENT.replace('["cab"]', "open('/nowhere/at/all')"),
            {},
            "spec.environment.entrypoint",
            "FileNotFoundError",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_explained(
    tmp_path: Path, code: str, args: dict[str, Any], field: str, words: str
) -> None:
    (tmp_path / "environment.py").write_text(code)
    found = checks.check_environment(make_job(environment={"args": args}), tmp_path)
    only(found, field, words)
    assert "Traceback" not in str(found[0])


def test_a_module_that_is_not_there_is_explained(tmp_path: Path) -> None:
    found = checks.check_environment(make_job(), tmp_path)
    only(found, "spec.environment.entrypoint", "put the file beside the job file")


def test_an_environment_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    found = checks.check_environment(make_job(), tmp_path, deadline_s=8.0)
    only(found, "spec.environment.entrypoint", "took more than 8 s")
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the environment's own child is still there"
        time.sleep(0.05)


def test_what_the_environment_prints_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text("print('x' * 200_000)\n" + ENVIRONMENT)
    assert checks.check_environment(make_job(), tmp_path) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ENVIRONMENT, "has 2 held-out problems"),
        (ENVIRONMENT.replace('["abc", "bca"]', "None"), "has no held-out problems"),
    ],
)
def test_evaluation_needs_enough_held_out_problems(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "environment.py").write_text(code)
    job = make_job(evaluation={"everySteps": 1, "prompts": 3})
    only(checks.check_environment(job, tmp_path), "spec.evaluation.prompts", words)


def test_problems_are_raised_as_one_error() -> None:
    checks.raise_for([], "job.yaml")
    with pytest.raises(JobError, match=r"job\.yaml: spec\.suspend"):
        checks.raise_for(checks.check_runs_locally(make_job(suspend=True)), "job.yaml")
