"""The examples: their job files are valid, their environments reward what they say, and fit a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight_runtime.actor import Answer, Reward, load_environment
from inflight_runtime.api import load_job
from inflight_runtime.config.roles import EnvironmentSpec

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
