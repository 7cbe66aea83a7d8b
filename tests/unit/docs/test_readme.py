"""What the README shows is what the project has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inflight_runtime.actor.loading import load_environment
from inflight_runtime.api import parse_job
from inflight_runtime.config.roles import EnvironmentSpec
from inflight_runtime.local.overrides import load_with_overrides

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()

# Where each long command of the README is run: a CI stage, or a test with real parts.
RUN_ELSEWHERE = {
    "make demo": ".ci/run",
    "make demo-smollm2": ".ci/run, in its short form",
    "make test": ".ci/run",
    "kubectl apply -f crds/ && kubectl apply -k manifests/": "tests/control_plane/test_install.py",
    "kubectl apply -k examples/sort-letters": "tests/control_plane/test_install.py, tests/cluster/test_sort_letters.py",
    ".venv/bin/inflight run examples/sort-letters/job.yaml": "make demo",
    ".venv/bin/inflight run --resume runs/latest": "tests/integration/runs/test_stop_and_resume.py",
    ".venv/bin/inflight samples --best -n 3": "tests/integration/runs/test_stop_and_resume.py",
    ".venv/bin/inflight status": "tests/integration/runs/test_stop_and_resume.py",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_job_shown_is_the_examples_job() -> None:
    shown = parse_job(blocks("yaml")[0], "README.md")
    there = parse_job((ROOT / "examples" / "sort-letters" / "job.yaml").read_text(), "job.yaml")
    assert shown == there


def test_the_environment_shown_loads_and_scores(tmp_path: Path) -> None:
    (tmp_path / "capitals.py").write_text(blocks("python")[0])
    environment = load_environment(EnvironmentSpec(entrypoint="capitals:Capitals", search_path=(str(tmp_path),)))
    assert environment.messages(environment.problems[1])[0]["content"].startswith("The capital of Japan")


def test_every_command_is_run_by_ci_or_a_test() -> None:
    unknown = [line for line in commands() if line not in RUN_ELSEWHERE and "inflight validate" not in line]
    assert not unknown, f"nothing runs these commands of the README: {unknown}"
    gone = [line for line in RUN_ELSEWHERE if line not in commands()]
    assert not gone, f"the README does not name these any more: {gone}"


def test_the_example_of_extra_arguments_is_taken() -> None:
    (arguments,) = re.findall(r'make demo RUN="--set ([^ "]+)"', (ROOT / "Makefile").read_text())
    load_with_overrides(ROOT / "examples" / "sort-letters" / "job.yaml", [arguments])


@pytest.mark.parametrize("line", [line for line in commands() if "inflight validate" in line])
def test_validate_says_what_a_job_lacks(line: str) -> None:
    words = line.split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "inflight_runtime", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # The model is made by `make demo`; without it the message names the field and the way out.
    assert done.returncode == 0 or "spec.model.source" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
