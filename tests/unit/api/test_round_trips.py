"""Jobs survive being written and read again, and no input whatever brings anything but a job or a JobError."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.api import JobError, RLTrainingJob, enums, parse_job, validate_job
from inflight_runtime.api.errors import inner_model, wire_names
from inflight_runtime.api.loading import dump_yaml, read_yaml
from inflight_runtime.config import roles

names = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
keys = st.text(max_size=80)  # YAML takes no key of more than 1,024 characters, escapes included
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def one_of(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


floats = st.floats(1e-9, 0.99)
resources = section(limits=st.just({"cpu": 2, "memory": "4Gi"}), requests=st.just({"cpu": "500m"}))
losses = section(
    isCap=st.none() | st.floats(0.5, 10), normalization=one_of(enums.Normalization), entropyBonus=floats
) | section(clipLow=floats, clipHigh=floats).map(lambda fields: {"kind": "ppo", **fields})
specs = st.fixed_dictionaries(
    {
        "model": section(dtype=one_of(enums.ServerDtype), trustRemoteCode=st.booleans()).map(
            lambda fields: {"source": "./model", **fields}
        ),
        "environment": section(
            args=st.dictionaries(keys, json_values, max_size=3), overlongPrompt=one_of(enums.OverlongPrompt)
        ).map(lambda fields: {"entrypoint": "a.b:C", **fields}),
        "algorithm": section(
            promptsPerStep=st.integers(1, 1000),
            groupSize=st.integers(2, 64),
            loss=losses,
            advantage=section(baseline=one_of(enums.Baseline), divideByStd=st.booleans()),
            maxStaleness=st.integers(0, 10),
            overAge=one_of(enums.OverAge),
            zeroVariance=one_of(enums.ZeroVariance),
            shuffle=st.booleans(),
        ).map(lambda fields: {"steps": 100, **fields}),
    },
    optional={
        "suspend": st.booleans(),
        "sampling": section(temperature=st.floats(0.1, 2), maxTokens=st.integers(1, 100_000), stop=st.just(["\n"])),
        "weightSync": section(transport=one_of(enums.Transport), kvCache=one_of(enums.KvCache)),
        "inference": section(replicas=st.none() | st.integers(0, 9), resources=resources, image=st.just("a/b:1")),
        "actors": section(concurrency=st.none() | st.integers(1, 9), resources=resources),
        "trainer": section(
            optimizer=section(
                learningRate=floats, betas=st.tuples(floats, floats).map(list), schedule=one_of(enums.Schedule)
            ),
            maxRestarts=st.integers(0, 9),
        ),
        "evaluation": st.none() | st.just({"everySteps": 10, "prompts": 4}),
        "checkpoint": section(
            everySteps=st.integers(0, 9),
            stopSeconds=st.integers(10, 99),
            storage=st.just({"size": "5Gi", "class": "fast"}),
        ),
    },
)
jobs = st.builds(
    lambda name, spec: {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    },
    names,
    specs,
)
BASE = {
    "apiVersion": "inflight.dev/v1alpha1",
    "kind": "RLTrainingJob",
    "metadata": {"name": "x"},
    "spec": {"model": {"source": "./m"}, "environment": {"entrypoint": "a:B"}, "algorithm": {"steps": 1}},
}


texts = (
    st.text(max_size=12)
    | st.sampled_from("yYnN")
    | st.from_regex(r"[-+]?[0-9.:_]*(0[xob])?[0-9a-f]*([eE][-+]?[0-9]+)?", fullmatch=True)
)
plain = st.recursive(
    texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, plain, max_size=3))
def test_what_is_written_as_yaml_is_read_back_alike(data: dict[str, Any]) -> None:
    """By us, who read as kubectl does, and by a reader of YAML 1.1."""
    text = dump_yaml(data)
    assert yaml.safe_load(text) == data
    if data:
        assert read_yaml(text, "written")[0] == data


@given(jobs)
def test_a_job_survives_every_way_of_writing_it(data: dict[str, Any]) -> None:
    job = validate_job(data, "generated")
    full = job.model_dump(mode="json", by_alias=True)
    assert validate_job(job.to_wire(), "wire") == job
    assert validate_job(full, "with all defaults") == job
    assert validate_job(json.loads(json.dumps(full)), "json") == job
    assert parse_job(dump_yaml(job.to_wire()), "yaml") == job
    assert parse_job(json.dumps(job.to_wire()), "json as yaml") == job


@given(jobs)
def test_only_what_was_given_goes_back_on_the_wire(data: dict[str, Any]) -> None:
    def shape(value: Any) -> Any:
        return {name: shape(item) for name, item in value.items()} if isinstance(value, dict) else None

    assert shape(validate_job(data, "generated").to_wire()) == shape(data)


def all_paths(model: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for wire, field in zip(wire_names(model), model.model_fields.values(), strict=True):
        found.append((*above, wire))
        inner = inner_model(field.annotation)
        if inner is not None:
            found += all_paths(inner, (*above, wire))
    return found


@settings(max_examples=300)
@given(st.sampled_from(all_paths(RLTrainingJob)), json_values)
def test_any_value_in_any_field_is_taken_or_explained(path: tuple[str, ...], value: Any) -> None:
    data: dict[str, Any] = copy.deepcopy(BASE)
    node = data
    for name in path[:-1]:
        node = node.setdefault(name, {})
    node[path[-1]] = value
    try:
        validate_job(data, "generated")
    except JobError as error:
        assert all(problem.reason and problem.remedy for problem in error.problems)
        assert not any(word in str(error) for word in ("pydantic", "Undefined", "Input should"))


@settings(max_examples=200)
@given(st.text() | st.text(alphabet="abk:{}[]-&*!?|>'\"#%@ \n\t0123456789.,e"))
def test_any_text_is_a_job_or_a_job_error(text: str) -> None:
    try:
        parse_job(text, "generated")
    except JobError as error:
        assert str(error).startswith("generated:")


def test_the_resource_and_the_roles_know_the_same_sets() -> None:
    for ours, theirs in [
        (enums.OverAge, roles.OverAge),
        (enums.ZeroVariance, roles.ZeroVariance),
        (enums.LossKind, roles.LossKind),
        (enums.Normalization, roles.Normalization),
        (enums.Baseline, roles.Baseline),
        (enums.Transport, roles.Transport),
        (enums.KvCache, roles.KvCache),
        (enums.InferenceEngine, roles.EngineKind),
        (enums.OverlongPrompt, roles.OverlongPrompt),
    ]:
        assert set(get_args(ours)) == set(get_args(theirs))


def test_every_field_is_described() -> None:
    def models(model: Any) -> list[Any]:
        inner = [found for field in model.model_fields.values() if (found := inner_model(field.annotation))]
        return [model, *(deeper for found in inner for deeper in models(found))]

    bare = [
        f"{model.__name__}.{name}"
        for model in models(RLTrainingJob)
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert bare == []


def test_a_status_of_a_newer_operator_can_be_read() -> None:
    status = {"phase": "Running", "novelty": 1, "progress": {"step": 3, "steps": 9, "novelty": 1}}
    job = validate_job({**BASE, "status": status}, "server")
    assert job.status is not None
    assert job.status.progress is not None
    assert (job.status.phase, job.status.progress.step) == ("Running", 3)
