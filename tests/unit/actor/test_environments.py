"""Environments: what may be returned as a reward, where problems come from, and how loading one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inflight_runtime.actor import (
    Answer,
    EnvironmentLoadError,
    HfDatasetProblems,
    JsonlProblems,
    Reward,
    SingleTurnEnvironment,
    load_environment,
)
from inflight_runtime.actor.environments import ENDLESS_EVAL, RewardError, dataset_sizes
from inflight_runtime.config.roles import EnvironmentSpec

GOOD = """
from inflight_runtime.actor import SingleTurnEnvironment

class Echo(SingleTurnEnvironment):
    def __init__(self, letters=3, *, start=0):
        self.letters, self.start = letters, start
    def problem(self, index):
        return self.start + index
    def messages(self, problem):
        return str(problem)
    def reward(self, problem, answer):
        return 1.0
"""


def write(directory: Path, name: str, text: str) -> None:
    (directory / f"{name}.py").write_text(text)


def load(directory: Path, entrypoint: str, **args: object):
    return load_environment(EnvironmentSpec(entrypoint=entrypoint, args=args, search_path=(str(directory),)))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, Reward(1.0)),
        (True, Reward(1.0)),
        (0.25, Reward(0.25)),
        ({"reward": 2, "exact": True}, Reward(2.0, {"exact": 1.0})),
        (Reward(0.5, {"exact": 1}), Reward(0.5, {"exact": 1.0})),
    ],
)
def test_rewards_are_read_from_numbers_dicts_and_rewards(returned, expected):
    assert Reward.of(returned) == expected


@pytest.mark.parametrize(
    "returned", [None, "good", [1.0], float("nan"), float("inf"), {"exact": 1.0}, {"reward": None}]
)
def test_what_is_no_reward_is_refused(returned):
    with pytest.raises(RewardError):
        Reward.of(returned)


def test_jsonl_problems_are_read_and_bad_lines_named(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    problems = JsonlProblems(file)
    assert list(problems) == [{"a": 1}, {"a": 2}]
    assert len(problems) == 2
    file.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"problems\.jsonl:2: expected a JSON object"):
        JsonlProblems(file)
    file.write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(ValueError, match=r"problems\.jsonl:2: not JSON"):
        JsonlProblems(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no problems"):
        JsonlProblems(file)


def test_a_dataset_on_disk_gives_its_rows(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": [1, 2]})
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "d"))
    problems = HfDatasetProblems(tmp_path / "d", "train")
    assert len(problems) == 2
    assert problems[1] == {"question": "b", "answer": 2}
    with pytest.raises(ValueError, match=r"name one of its splits \['test', 'train'\]"):
        HfDatasetProblems(tmp_path / "d")


class Listed(SingleTurnEnvironment):
    def __init__(self) -> None:
        self.problems = ["p", "q"]
        self.eval_problems = ["e"]

    def messages(self, problem):
        return problem

    def reward(self, problem, answer: Answer) -> float:
        return 0.0


class Generated(Listed):
    def __init__(self) -> None:
        pass

    def problem(self, index):
        return index

    def eval_problem(self, index):
        return -index


def test_sizes_tell_finite_endless_and_held_out_problems():
    assert dataset_sizes(Listed()) == (2, 1)
    assert dataset_sizes(Generated()) == (None, ENDLESS_EVAL)
    assert Listed().problem(1) == "q"
    assert Listed().eval_problem(0) == "e"


def test_an_environment_is_loaded_with_its_arguments(tmp_path):
    write(tmp_path, "env_good", GOOD)
    environment = load(tmp_path, "env_good:Echo", letters=5, start=10)
    assert environment.letters == 5
    assert environment.problem(2) == 12


BROKEN = {
    "env_syntax": "def broken(:\n    pass\n",
    "env_raises": "raise RuntimeError('no data here')\n",
    "env_needs": "import a_module_that_is_not_there\n",
    "env_classes": GOOD.replace("env_good", "env_classes")
    + """
class NotOne:
    pass

class Half(SingleTurnEnvironment):
    def messages(self, problem):
        return ""

class NoProblems(SingleTurnEnvironment):
    def messages(self, problem):
        return ""
    def reward(self, problem, answer):
        return 0.0

class Empty(NoProblems):
    def __init__(self):
        self.problems = []

class Needs(NoProblems):
    def __init__(self, path):
        raise OSError(f"cannot read {path}")
""",
}


@pytest.mark.parametrize(
    ("entrypoint", "args", "message"),
    [
        ("env_missing:Echo", {}, "there is no module 'env_missing'.*put the file beside the job file"),
        ("env_syntax:Echo", {}, r"env_syntax\.py:1: syntax error"),
        ("env_raises:Echo", {}, r"RuntimeError: no data here \(env_raises\.py:1"),
        ("env_needs:Echo", {}, "needs 'a_module_that_is_not_there', which is not installed"),
        ("env_classes:Ecko", {}, "no class 'Ecko'; it has Echo"),
        ("env_classes:NotOne", {}, "derive it from"),
        ("env_classes:Half", {}, "does not implement reward"),
        ("env_classes:NoProblems", {}, "set self.problems in its constructor, or override"),
        ("env_classes:Empty", {}, "problems is empty"),
        (
            "env_classes:Echo",
            {"leters": 3},
            "environment.args.leters: Echo has no such argument; did you mean 'letters'",
        ),
        ("env_classes:Needs", {}, "Needs needs path"),
        ("env_classes:Needs", {"path": "x"}, r"OSError: cannot read x \(env_classes\.py"),
        ("env_classes", {}, "expected 'module:Class'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_explained(tmp_path, entrypoint, args, message):
    for name, text in BROKEN.items():
        write(tmp_path, name, text)
    for name in BROKEN:
        sys.modules.pop(name, None)
    with pytest.raises(EnvironmentLoadError, match=message):
        load(tmp_path, entrypoint, **args)


def test_loading_an_environment_imports_neither_torch_nor_transformers(tmp_path):
    write(tmp_path, "env_light", GOOD)
    code = (
        "import sys; from inflight_runtime.actor import load_environment;"
        "from inflight_runtime.config.roles import EnvironmentSpec;"
        f"load_environment(EnvironmentSpec(entrypoint='env_light:Echo', search_path=({str(tmp_path)!r},)));"
        "print([m for m in ('torch', 'transformers', 'aiohttp', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
