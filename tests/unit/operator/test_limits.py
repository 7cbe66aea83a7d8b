"""Names and labels at the limits of what a job may be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_operator import names
from inflight_operator.builders import Child
from inflight_runtime.api import MAX_NAME_LENGTH
from support.cluster_jobs import CODE, SETTINGS, children, make_job, on_nodes

GUARDED = SETTINGS.model_copy(update={"operator_namespace": "inflight-system", "scrape_from": {"podSelector": {}}})
LONGEST = "j" * MAX_NAME_LENGTH
REPLICAS = 1000
LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
"""RFC 1123 label; a Service must begin with a letter besides."""
LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
LABEL_KEY = re.compile(r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
HASH = "0123456789"
"""What a StatefulSet or Deployment puts behind a name to tell its revisions apart, at its longest."""


def generated_names(child: Child) -> list[str]:
    """Names and label values that controllers make from a child, at their longest."""
    name, last = child.name, REPLICAS - 1
    if child.kind == "StatefulSet":
        return [f"{name}-{last}", f"{name}-{HASH}"]
    if child.kind == "Deployment":
        return [f"{name}-{HASH}-abcde"]
    if child.kind == "Job":
        return [f"{name}-abcde"]
    if child.kind == "JobSet":
        job = child.manifest["spec"]["replicatedJobs"][0]
        return [f"{name}-{job['name']}-0-{last}-abcde", f"{name}-{job['name']}-0-{last}"]
    return []


def labels_in(value: Any) -> list[tuple[str, str]]:
    """Every label in a manifest, wherever it stands."""
    if isinstance(value, list):
        return [pair for item in value for pair in labels_in(item)]
    if not isinstance(value, dict):
        return []
    own = [(k, v) for field in ("labels", "matchLabels") for k, v in (value.get(field) or {}).items()]
    return own + [pair for item in value.values() for pair in labels_in(item)]


def check(found: list[Child]) -> None:
    seen: set[tuple[str, str]] = set()
    for child in found:
        assert (child.kind, child.name) not in seen
        seen.add((child.kind, child.name))
        for name in (child.name, *generated_names(child)):
            assert len(name) <= 63, name
            assert LABEL.match(name), name
        for key, value in labels_in(child.manifest):
            assert LABEL_KEY.match(key), key
            assert len(value) <= 63, value
            assert LABEL_VALUE.match(value), value


def test_the_longest_name_fits_with_a_thousand_nodes_servers_and_actors() -> None:
    job = make_job(
        LONGEST,
        model={"source": "example-org/model-1b", "tokenizer": "example-org/tokenizer"},
        environment={"configMap": "code"},
        inference={"replicas": REPLICAS},
        actors={"replicas": REPLICAS},
    )
    found = children(on_nodes(job, REPLICAS, 8), GUARDED, code=CODE)
    assert len(found) == 20
    check(found)


@pytest.mark.parametrize("first", ["x", "x-inference", "x-from", "x-t", "x-model", "x-config"])
@pytest.mark.parametrize("second", ["x-coordinator", "x-inference-pods", "x-actor", "x-t-n-0"])
def test_two_jobs_never_want_the_same_object(first: str, second: str) -> None:
    def objects(name: str) -> set[tuple[str, str]]:
        job = make_job(name, model={"source": "example-org/m"}, environment={"configMap": "code"})
        return {(child.kind, child.name) for child in children(job, GUARDED, code=CODE)}

    assert not objects(first) & objects(second)


def test_no_object_takes_a_name_that_the_namespace_needs() -> None:
    found = {(child.kind, child.name) for child in children(make_job("default"))}
    assert ("ServiceAccount", "default") not in found


job_names = st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z")
models = st.one_of(
    st.builds(lambda path: {"source": f"./{path}"}, st.text("abc/", max_size=8)),
    st.just({"source": "example-org/model"}),
    st.just({"source": "example-org/model", "tokenizer": "example-org/tokenizer", "revision": "main"}),
    st.just({"source": None, "volume": {"claimName": "models.of.the-team", "subPath": "a"}}),
    st.just({"source": None, "volume": {"claimName": "models"}, "tokenizer": "example-org/tokenizer"}),
)
quantities = st.sampled_from(["1", "500m", "2.5", "16Gi", "1e3", "100M", 4])
resources = st.fixed_dictionaries(
    {},
    optional={
        part: st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage"]), quantities)
        for part in ("requests", "limits")
    },
)
replicas = st.one_of(st.none(), st.integers(0, 1000))
overlays = st.sampled_from(
    [
        {},
        {"metadata": {"labels": {"team": "a"}, "annotations": None}},
        {"metadata": None},
        {"spec": {"tolerations": [{"operator": "Exists"}], "volumes": [{"name": "x", "emptyDir": {}}]}},
        {"spec": {"initContainers": [{"name": "first", "image": "x"}]}},
    ]
)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    def role(**more: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {name: draw(field) for name, field in {"resources": resources, "podTemplate": overlays, **more}.items()}

    return {
        "model": draw(models),
        "environment": draw(st.sampled_from([{}, {"configMap": "code"}])),
        "inference": role(replicas=replicas, tensorParallel=st.sampled_from([1, 2, 8])),
        "actors": role(replicas=replicas),
        "trainer": role(maxRestarts=st.integers(0, 1000)),
        "coordinator": role(),
        "checkpoint": draw(
            st.sampled_from([{}, {"claimName": "c"}, {"storage": {"class": "fast"}, "onDelete": "Delete"}])
        ),
    }


@settings(max_examples=60)
@given(job_names, jobs(), st.integers(1, 1000))
def test_any_valid_job_builds_children_with_valid_names_and_labels(
    name: str, sections: dict[str, Any], nodes: int
) -> None:
    # A group must fit into one server where there are several.
    job = make_job(name, **{**sections, "algorithm": {"steps": 1, "groupSize": 2}})
    found = children(on_nodes(job, nodes), GUARDED, code=CODE)
    check(found)
    assert {child.role for child in found} >= set(names.ROLES)
