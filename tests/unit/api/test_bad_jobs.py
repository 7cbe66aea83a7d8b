"""What ``inflight validate`` says of the wrong jobs of ``support/bad_jobs.py``: field, value, reason and remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from inflight_runtime.api import JobError, parse_job, validate_job
from support.bad_jobs import BAD_JOBS, GOOD, VALID_NEIGHBOURS, Bad, changed, merge


def refuse(job: dict[str, Any]) -> JobError:
    with pytest.raises(JobError) as caught:
        validate_job(job, "job.yaml")
    return caught.value


@pytest.mark.parametrize("bad", BAD_JOBS, ids=str)
def test_a_wrong_field_is_named_with_its_remedy(bad: Bad) -> None:
    error = refuse(bad.job)
    assert [problem.field for problem in error.problems] == [bad.field]
    assert bad.words in str(error)
    assert bad.remedy in error.problems[0].remedy
    assert error.problems[0].reason
    assert error.problems[0].remedy


def test_no_row_is_there_twice() -> None:
    changes = [*(bad.change for bad in BAD_JOBS), *VALID_NEIGHBOURS]
    assert len(set(changes)) == len(changes)


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (("spec",), "spec", "What is wanted"),
        (("metadata", "name"), "metadata.name", "Name of the job"),
        (("apiVersion",), "apiVersion", "Always `inflight.dev/v1alpha1`"),
        (("spec", "algorithm", "steps"), "spec.algorithm.steps", "Optimizer steps of the whole run"),
        (("spec", "environment"), "spec.environment", "Prompts, rollouts and rewards"),
    ],
)
def test_a_missing_field_is_explained(path: tuple[str, ...], field: str, words: str) -> None:
    job = copy.deepcopy(GOOD)
    node = job
    for name in path[:-1]:
        node = node[name]
    del node[path[-1]]
    (problem,) = refuse(job).problems
    assert (problem.field, problem.reason, problem.value) == (field, "is required", None)
    assert words in problem.remedy


@pytest.mark.parametrize("change", VALID_NEIGHBOURS)
def test_a_valid_neighbour_is_accepted(change: str) -> None:
    validate_job(changed(change), "job.yaml")


def test_nulls_that_the_api_server_drops_from_an_overlay_are_dropped() -> None:
    overlay = """spec: {actors: {podTemplate: {
      metadata: {labels: {team: null, a: b}, annotations: null},
      spec: {containers: [{name: actor, env: null, image: null}], initContainers: null, nodeSelector: null}}}}"""
    assert validate_job(changed(overlay), "job.yaml").spec.actors.pod_template == {
        "metadata": {"labels": {"a": "b"}, "annotations": None},
        "spec": {"containers": [{"name": "actor", "image": None}], "nodeSelector": None},
    }


def test_all_problems_are_told_at_once_with_their_lines() -> None:
    text = (
        yaml.safe_dump(GOOD, sort_keys=False).replace("groupSize: 8", "groupsize: 8").replace("steps: 100", "steps: -1")
    )
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "job.yaml: 2 problems"
    numbers = [text[: text.index(word)].count("\n") + 1 for word in ("steps:", "groupsize:")]
    assert lines[1].startswith(f"  line {numbers[0]}: spec.algorithm.steps: must be at least 1 (got -1); ")
    assert lines[2] == f"  line {numbers[1]}: spec.algorithm.groupsize: unknown field (got 8); did you mean groupSize?"


def test_contradictions_are_told_together_with_their_lines() -> None:
    text = yaml.safe_dump(merge(GOOD, {"spec": {"trainer": {"nodes": 2, "microBatchTokens": 1}}}), sort_keys=False)
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    found = {problem.field: problem.line for problem in caught.value.problems}
    assert found == {
        "spec.trainer.nodes": text[: text.index("nodes:")].count("\n") + 1,
        "spec.trainer.microBatchTokens": text[: text.index("microBatchTokens:")].count("\n") + 1,
    }


def test_a_problem_inside_a_pod_template_has_its_line() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "RANK", "value": "2"}]
    overlay = {"spec": {"containers": [{"name": "actor", "env": env}]}}
    text = yaml.safe_dump(merge(GOOD, {"spec": {"actors": {"podTemplate": overlay}}}), sort_keys=False)
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    (problem,) = caught.value.problems
    assert problem.line == text[: text.index("name: RANK")].count("\n") + 1


def test_a_long_value_is_shortened() -> None:
    error = refuse(changed(f"spec: {{algorithm: {{overAge: {'x' * 500}}}}}"))
    assert len(str(error)) < 300
    assert "..." in str(error)


def test_another_kind_of_object_is_not_picked_apart() -> None:
    with pytest.raises(JobError) as caught:
        validate_job({"apiVersion": "v1", "kind": "ConfigMap", "data": {}}, "job.yaml")
    assert (
        str(caught.value)
        == 'job.yaml: kind: must be RLTrainingJob (got "ConfigMap"); give the file of an RLTrainingJob'
    )
