from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from jobs import BENCHMARKS, EXAMPLE, common_overrides, long_tailed, slow_overrides
from long_tailed import LongTailed
from machine_facts import cpu_model, environment_facts, git_commit, package_version

from inflight_runtime.api import validate_job
from inflight_runtime.local.overrides import apply


@pytest.mark.parametrize("staleness", [0, 4])
def test_both_jobs_are_valid_with_every_staleness(staleness: int) -> None:
    example = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    for job in (example, long_tailed(example)):
        checked = validate_job(apply(job, common_overrides(staleness)), "job")
        assert checked.spec.algorithm.max_staleness == staleness


def test_the_slow_job_is_valid_and_its_environment_takes_its_arguments() -> None:
    example = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job = validate_job(apply(long_tailed(example), [*common_overrides(4), *slow_overrides()]), "job")
    environment = LongTailed(**job.spec.environment.args)
    assert environment.pause_s > 0
    assert environment.median == 4
    assert job.spec.algorithm.prompts_per_step == 1


def test_the_long_tailed_job_differs_only_in_its_answers() -> None:
    example = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    variant = long_tailed(example)
    for part in ("algorithm", "trainer", "actors", "model"):
        assert variant["spec"][part] == example["spec"][part]
    assert "evaluation" in example["spec"], "the example is left as it was"


def test_long_tailed_lengths_have_their_median_and_their_bounds() -> None:
    environment = LongTailed(median=16, sigma=1.2, longest=300)
    lengths = sorted(environment.length(random.Random(seed)) for seed in range(2000))
    assert lengths[0] >= 1
    assert lengths[-1] == 300
    assert 14 <= lengths[1000] <= 18
    assert lengths[1980] > 10 * lengths[1000], "the longest hundredth is what others wait for"


def test_the_same_problem_comes_from_the_same_index() -> None:
    assert LongTailed().problem(7) == LongTailed().problem(7)


def test_the_cpu_is_named() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t: a\n") == "Some CPU @ 3 GHz"
    assert cpu_model("")


def test_versions_are_of_the_first_distribution_that_is_there() -> None:
    version = package_version(("no-such-distribution", "numpy"))
    assert version is not None
    assert version.endswith("(numpy)")
    assert package_version(("no-such-distribution",)) is None


def test_outside_a_clone_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None


def test_the_facts_name_machine_and_versions() -> None:
    facts = environment_facts()
    assert facts["cores"] >= 1
    assert len(facts["load_average"]) == 3
    assert facts["torch"]
    assert BENCHMARKS.name == "benchmarks"
