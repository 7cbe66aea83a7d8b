"""The generated CustomResourceDefinition: what a file can tell; what the API server says is in tests/control_plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight_operator.crd import TARGET, build_crd, render_crd
from inflight_operator.validation import FREE_AT_RUN_TIME
from inflight_runtime.api.placement import COUNTED_ENGINE_ARGS, RESERVED_ENGINE_ARGS

REPOSITORY = Path(__file__).resolve().parents[3]
STRUCTURE = {"$ref", "anyOf", "oneOf", "allOf", "const", "title", "examples", "$defs"}


@pytest.fixture(scope="module")
def version() -> dict[str, Any]:
    (only,) = build_crd()["spec"]["versions"]
    return only


@pytest.fixture(scope="module")
def schema(version: dict[str, Any]) -> dict[str, Any]:
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[{name}]")


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(nodes(schema))[path]


def test_the_committed_file_is_what_the_models_give() -> None:
    assert (REPOSITORY / TARGET).read_text() == render_crd(), "run: python -m inflight_operator.crd"


def test_client_side_apply_has_room_for_it() -> None:
    # kubectl keeps the whole object in an annotation of at most 262,144 bytes.
    assert len(render_crd()) < 200_000
    assert yaml.safe_load(render_crd()) == build_crd()


def test_the_schema_is_structural(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        assert not STRUCTURE & set(node), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_field_is_explained(schema: dict[str, Any]) -> None:
    """`kubectl explain` shows these. Of the metadata a schema may say nothing."""
    silent = [
        path
        for path, node in nodes(schema)
        if not path.startswith(".metadata") and not path.endswith("]") and not node.get("description")
    ]
    assert not silent


def test_descriptions_end_with_default_and_bounds(schema: dict[str, Any]) -> None:
    """`kubectl explain` shows neither by itself."""
    for path, words in (
        (".algorithm.groupSize", "at least two. Default 8, at least 2, at most 4096."),
        (".trainer.optimizer.learningRate", "Default 1e-06, above 0, at most 1."),
        (".trainer.optimizer.betas", "Default [0.9, 0.95]."),
        (".checkpoint.onDelete", "Default Retain."),
        (".algorithm.shuffle", "Default true."),
        (".algorithm.steps", "At least 1, at most 10000000."),
        (".sampling.stop", "besides the end-of-sequence token."),
    ):
        assert at(schema, f".spec{path}")["description"].endswith(words)


def test_defaults_are_those_of_the_models_and_replicas_have_none(schema: dict[str, Any]) -> None:
    assert at(schema, ".spec.algorithm.groupSize")["default"] == 8
    assert at(schema, ".spec.sampling")["default"] == {"temperature": 1.0, "maxTokens": 8192, "stop": []}
    assert at(schema, ".spec.trainer.optimizer.betas")["default"] == [0.9, 0.95]
    for role in ("inference", "actors"):
        assert "default" not in at(schema, f".spec.{role}.replicas")
    assert "default" not in at(schema, ".spec.algorithm.loss.isCap")  # depends on the kind of loss


def test_bounds_and_nulls_are_in_the_dialect_of_crds(schema: dict[str, Any]) -> None:
    rate = at(schema, ".spec.trainer.optimizer.learningRate")
    assert (rate["minimum"], rate["exclusiveMinimum"]) == (0, True)
    assert at(schema, ".spec.trainer.optimizer.gradClipNorm")["nullable"] is True
    assert at(schema, ".spec.coordinator.storage.size")["x-kubernetes-int-or-string"] is True


def test_every_rule_says_how_to_mend_it(schema: dict[str, Any]) -> None:
    rules = [rule for _, node in nodes(schema) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 30
    for rule in rules:
        # With a value to show the message is an expression.
        assert ("message" in rule) != ("messageExpression" in rule)
        assert "; " in rule.get("message", "") or " (got %s); " in rule.get("messageExpression", "")


def test_no_rule_is_there_twice_and_nothing_is_an_alias(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema):
        rules = [(rule["rule"], rule.get("fieldPath")) for rule in node.get("x-kubernetes-validations", ())]
        assert len(set(rules)) == len(rules), path
    assert not [token for token in yaml.scan(render_crd()) if isinstance(token, yaml.AliasToken)]


def test_engine_flags_of_the_run_are_declared_for_rules_to_reach_them(schema: dict[str, Any]) -> None:
    args = at(schema, ".spec.inference.engineArgs")
    assert args["x-kubernetes-preserve-unknown-fields"] is True
    assert set(RESERVED_ENGINE_ARGS) | set(COUNTED_ENGINE_ARGS) <= set(args["properties"])
    for spelling in ("max_num_seqs", "--port", "no-enable-lora", "max_model_len"):
        assert args["properties"][spelling]["x-kubernetes-validations"]


def test_what_may_not_change_while_a_job_runs_is_everything_else(schema: dict[str, Any]) -> None:
    spec = at(schema, ".spec")
    fixed = {rule["fieldPath"][1:] for rule in spec["x-kubernetes-validations"] if "oldSelf" in rule["rule"]}
    assert fixed == set(spec["properties"]) - set(FREE_AT_RUN_TIME)
    for role in ("inference", "actors"):
        (rule,) = [
            rule["rule"]
            for rule in spec["x-kubernetes-validations"]
            if "oldSelf" in rule["rule"] and rule["fieldPath"] == f".{role}"
        ]
        for field in spec["properties"][role]["properties"]:
            assert (f"self.{role}.{field} ==" in rule) == (field != "replicas")


def test_kubectl_shows_what_people_look_for(version: dict[str, Any]) -> None:
    columns = {column["name"]: column for column in version["additionalPrinterColumns"]}
    assert list(columns)[:8] == ["Phase", "Step", "Reward", "Inference", "Actors", "Trainer", "Restarts", "Age"]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.inference.selector"
    names = build_crd()["spec"]["names"]
    assert (names["shortNames"], names["categories"]) == (["rltj"], ["all"])
