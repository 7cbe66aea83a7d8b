"""Whether a live object still is what was asked for."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator.builders import build_children
from inflight_operator.drift import KEYS, QUANTITIES, drift, quantity
from support.cluster_jobs import FACTS, SETTINGS, make_job

JOB = make_job(model={"source": "example-org/model-1b"}, environment={"configMap": "code"}, actors={"replicas": 3})
MANIFESTS = [child.manifest for child in build_children(JOB, SETTINGS, FACTS) if child.kind != "Secret"]
manifests = st.sampled_from(MANIFESTS)
Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values in an object that are neither empty nor containers."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from leaves(below, (*path, name))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from leaves(below, (*path, index))
    elif value not in (None, False, ""):
        yield path


def at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def as_served(desired: Any, chance: random.Random, field: str = "") -> Any:
    """An object as the API server gives it back: with defaults, others' fields, and nothing that is empty."""
    if isinstance(desired, dict):
        found = {
            name: as_served(value, chance, field if field in QUANTITIES else name)
            for name, value in desired.items()
            if not is_empty(value) or chance.random() < 0.5
        }
        if field not in QUANTITIES:
            found["addedByTheServer"] = chance.choice([1, "x", [], {"a": "b"}])
        return found
    if isinstance(desired, list):
        found_list = [as_served(one, chance) for one in desired]
        key = KEYS.get(field)
        if key is not None and all(isinstance(one, dict) and key in one for one in desired):
            found_list.append({key: "somebody-else's"})
            chance.shuffle(found_list)
        return found_list
    if field in QUANTITIES and quantity(desired) is not None:
        return chance.choice([desired, f"{int(quantity(desired) * 1000)}m"])  # type: ignore[operator]
    return desired


@given(manifests, st.randoms(use_true_random=False))
def test_what_the_server_adds_and_writes_its_own_way_is_no_drift(
    desired: dict[str, Any], chance: random.Random
) -> None:
    assert drift(desired, as_served(desired, chance)) == ""


@given(manifests, st.data())
def test_a_change_of_any_field_that_is_ours_is_found(desired: dict[str, Any], data: st.DataObject) -> None:
    metadata = {name: desired["metadata"][name] for name in ("labels", "annotations")}
    ours = {name: value for name, value in desired.items() if name not in ("apiVersion", "kind", "metadata")}
    path = data.draw(st.sampled_from(list(leaves({"metadata": metadata, **ours}))))
    changed = copy.deepcopy(desired)
    place, last = at(changed, path[:-1]), path[-1]
    if data.draw(st.booleans()) or isinstance(place, list):
        place[last] = "something else" if place[last] != "something else" else 1
    else:
        del place[last]
    assert drift(desired, changed)


@pytest.mark.parametrize(
    ("desired", "live", "same"),
    [
        ("1", "1000m", True),
        ("1000m", 1, True),
        ("1Gi", "1024Mi", True),
        ("1e3", "1k", True),
        ("0.5", "500m", True),
        ("1G", "1Gi", False),
        ("1", "2", False),
        ("1", None, False),
        ("lots", "lots", True),
        ("lots", "more", False),
    ],
)
def test_quantities_are_compared_as_numbers(desired: Any, live: Any, same: bool) -> None:
    def manifest(value: Any) -> dict[str, Any]:
        return {"metadata": {}, "spec": {"resources": {"limits": {"cpu": value}}, "volumes": {"sizeLimit": "1"}}}

    assert (drift(manifest(desired), manifest(live)) == "") == same


@pytest.mark.parametrize(
    ("desired", "live", "where"),
    [
        ({"a": 1}, {"a": True}, "spec.a"),
        ({"a": 1}, {"a": "1"}, "spec.a"),
        ({"a": 0}, {}, "spec.a"),
        ({"a": False}, {}, ""),
        ({"a": []}, {"a": None}, ""),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, "spec.a[0]"),
        ({"a": ["x"]}, {"a": ["x", "y"]}, "spec.a"),
        ({"a": {"b": 1}}, {"a": [1]}, "spec.a"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B"}, {"name": "A", "value": "1"}]}, ""),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]}, "spec.env[A].value"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": []}, "spec.env[A]"),
    ],
)
def test_the_first_field_that_differs_is_named(desired: Any, live: Any, where: str) -> None:
    assert drift({"metadata": {}, "spec": desired}, {"metadata": {}, "spec": live}) == where


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", "1"),
        ("+1.5", "1.5"),
        (".5", "0.5"),
        ("1n", "0.000000001"),
        ("2Ki", "2048"),
        ("1Ei", str(2**60)),
        ("3E", "3000000000000000000"),
        ("1e-2", "0.01"),
        ("1E3", "1000"),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1.2.3", "-", "1ki", None, "lots"])
def test_what_is_no_quantity_has_no_number(text: str | None) -> None:
    assert quantity(text) is None
