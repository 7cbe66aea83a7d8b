"""The examples: their job files are valid, their environments reward what they say, and fit a page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inflight_runtime.actor import Answer, Reward, load_environment
from inflight_runtime.api import load_job
from inflight_runtime.config.checks import check_local_run
from inflight_runtime.config.render import LocalLayout, render_local
from inflight_runtime.config.roles import EnvironmentSpec
from inflight_runtime.inference.vllm_launch import build_command
from support.tiny_models import make_tiny_model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ENVIRONMENTS = {"sort-letters": "sort_letters.py", "smollm2-arithmetic": "arithmetic.py"}


def environment(example: str, **args):
    job = load_job(EXAMPLES / example / "job.yaml")
    spec = EnvironmentSpec(
        entrypoint=job.spec.environment.entrypoint,
        args=job.spec.environment.args | args,
        search_path=(str(EXAMPLES / example),),
    )
    return load_environment(spec)


@pytest.mark.parametrize("example", ENVIRONMENTS)
def test_an_environment_fits_a_page(example):
    assert len((EXAMPLES / example / ENVIRONMENTS[example]).read_text().splitlines()) < 100


@pytest.mark.parametrize("example", ENVIRONMENTS)
def test_problems_depend_on_index_and_seed_alone(example):
    one, again, other = environment(example), environment(example), environment(example, seed=1)
    first = [one.problem(index) for index in range(50)]
    assert first == [again.problem(index) for index in range(50)]
    assert first != [other.problem(index) for index in range(50)]
    assert len({str(problem) for problem in first}) > 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def job_file(name: str, directory: Path, model: Path) -> Path:
    """An example's job file in a copy of its directory, with a tiny model."""
    example = directory / Path(name).parent
    shutil.copytree(EXAMPLES / example.name, example, ignore=shutil.ignore_patterns("model"))
    shutil.copytree(model, example / "model")
    return example / Path(name).name


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("sort-letters/job.yaml", "cpu"),
        ("smollm2-arithmetic/job.yaml", "cpu"),
        ("smollm2-arithmetic/job-one-gpu.yaml", "cpu"),
        ("smollm2-arithmetic/job-one-gpu.yaml", "cuda"),
    ],
)
def test_a_job_file_has_no_problems(name, device, tiny, tmp_path):
    file = job_file(name, tmp_path, tiny)
    assert check_local_run(load_job(file), file.parent, device, gpus=1) == []


def test_on_one_gpu_server_and_trainer_share_the_device_and_its_memory(tiny, tmp_path):
    file = job_file("smollm2-arithmetic/job-one-gpu.yaml", tmp_path, tiny)
    layout = LocalLayout(
        file.parent, tmp_path / "token", coordinator_port=1, server_ports=(2,), actor_health_ports=(3,), device="cuda"
    )
    rendered = render_local(load_job(file), tmp_path / "run", layout)
    assert (rendered.trainer.device, rendered.trainer.weight_sync.transport) == ("cuda", "gloo")
    (server,) = rendered.inference
    assert server.device == "cuda"
    command = build_command(server)
    for flag, value in (("dtype", "bfloat16"), ("gpu-memory-utilization", "0.4"), ("max-num-seqs", "256")):
        assert f"--{flag}={value}" in command or command[command.index(f"--{flag}") + 1] == value
    assert "--enforce-eager" in command
    assert "--kv-cache-memory-bytes" not in command, "it would win over gpu-memory-utilization"


def said(text: str, finish: str = "stop") -> Answer:
    return Answer(text, finish, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "finish", "value", "exact"),
    [
        ("abh", "stop", 1.0, 1.0),
        ("abc", "stop", 0.5 * 2 / 3, 0.0),
        ("abhh", "stop", 0.5 * 3 / 4, 0.0),
        ("ab", "stop", 0.5 * 2 / 3, 0.0),
        ("", "stop", 0.0, 0.0),
        ("abh", "length", 0.0, 0.0),
    ],
)
def test_sorting_gives_partial_credit_to_answers_that_end(text, finish, value, exact):
    reward = environment("sort-letters").reward("hba", said(text, finish))
    assert reward == Reward(pytest.approx(value), {"exact": exact})


def test_sorting_never_trains_on_its_held_out_strings():
    sorting = environment("sort-letters")
    held_out = set(sorting.eval_problems)
    assert len(held_out) == 64
    assert held_out.isdisjoint(sorting.problem(index) for index in range(3000))
    job = load_job(EXAMPLES / "sort-letters" / "job.yaml")
    assert job.spec.evaluation is not None
    assert job.spec.evaluation.prompts <= len(held_out)
    assert environment("sort-letters", seed=5).eval_problems == sorting.eval_problems


@pytest.mark.parametrize(
    ("text", "finish", "value", "exact", "number"),
    [
        ("12", "stop", 1.0, 1.0, 1.0),
        (" 12.", "stop", 1.0, 1.0, 1.0),
        ("13", "stop", 0.3, 0.0, 1.0),
        ("4+8=12", "stop", 0.0, 0.0, 0.0),
        ("twelve", "stop", 0.0, 0.0, 0.0),
        ("12", "length", 0.0, 0.0, 0.0),
    ],
)
def test_arithmetic_rewards_the_number_and_nothing_else(text, finish, value, exact, number):
    arithmetic = environment("smollm2-arithmetic")
    problem = type(arithmetic.problem(0))(4, 8)
    assert arithmetic.reward(problem, said(text, finish)) == Reward(value, {"exact": exact, "number": number})


def test_arithmetic_asks_with_a_system_message_and_one_worked_example():
    arithmetic = environment("smollm2-arithmetic")
    messages = arithmetic.messages(type(arithmetic.problem(0))(4, 8))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[-1]["content"] == "4+8="
