"""Strategic merge of pod templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator.merge import MERGE_KEYS, MergeError, merge_template

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "image": "x:1",
                "command": ["run"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "p"}}}],
                "ports": [{"name": "http", "containerPort": 80}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "startupProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 2},
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
    },
}


def main_of(overlay: dict[str, Any]) -> dict[str, Any]:
    merged = merge_template(BASE, {"spec": {"containers": [{"name": "main", **overlay}]}})
    container: dict[str, Any] = merged["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(
    ("overlay", "field", "expected"),
    [
        ({"image": "y:2"}, "image", "y:2"),
        ({"command": ["other", "words"]}, "command", ["other", "words"]),  # a list without keys is replaced
        ({"command": None}, "command", None),
        (
            {"env": [{"name": "A", "value": "2"}]},
            "env",
            [{"name": "A", "value": "2"}, BASE["spec"]["containers"][0]["env"][1]],
        ),
        ({"env": [{"name": "B", "value": "2"}]}, "env", [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]),
        ({"env": [{"name": "B", "$patch": "delete"}]}, "env", [{"name": "A", "value": "1"}]),
        ({"env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]}, "env", [{"name": "C", "value": "3"}]),
        (
            {
                "volumeMounts": [
                    {"name": "tmp", "mountPath": "/tmp", "readOnly": True},
                    {"name": "d", "mountPath": "/d"},
                ]
            },
            "volumeMounts",
            [{"name": "tmp", "mountPath": "/tmp", "readOnly": True}, {"name": "d", "mountPath": "/d"}],
        ),
        ({"ports": [{"containerPort": 80, "name": "web"}]}, "ports", [{"name": "web", "containerPort": 80}]),
        ({"envFrom": [{"secretRef": {"name": "s"}}]}, "envFrom", [{"secretRef": {"name": "s"}}]),
        (
            {"startupProbe": {"exec": {"command": ["true"]}}},
            "startupProbe",
            {"exec": {"command": ["true"]}, "periodSeconds": 2},
        ),
        (
            {"startupProbe": {"$patch": "replace", "exec": {"command": ["x"]}}},
            "startupProbe",
            {"exec": {"command": ["x"]}},
        ),
        ({"startupProbe": {"$patch": "delete"}}, "startupProbe", None),
        (
            {"startupProbe": {"periodSeconds": 9}},
            "startupProbe",
            {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 9},
        ),
    ],
)
def test_a_container_is_merged_field_by_field(overlay: dict[str, Any], field: str, expected: Any) -> None:
    assert main_of(overlay).get(field) == expected


@pytest.mark.parametrize(
    ("volume", "expected"),
    [
        ({"emptyDir": {"sizeLimit": "2Gi"}}, {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}),
        ({"persistentVolumeClaim": {"claimName": "c"}}, {"persistentVolumeClaim": {"claimName": "c"}}),
    ],
)
def test_a_volume_keeps_one_source(volume: dict[str, Any], expected: dict[str, Any]) -> None:
    merged = merge_template(BASE, {"spec": {"volumes": [{"name": "tmp", **volume}]}})
    assert merged["spec"]["volumes"] == [{"name": "tmp", **expected}]


def test_new_elements_come_after_ours_and_lists_without_keys_are_replaced() -> None:
    overlay = {
        "spec": {
            "containers": [{"name": "sidecar", "image": "s"}],
            "initContainers": [{"name": "first"}],
            "imagePullSecrets": [{"name": "r"}],
            "tolerations": [{"key": "k"}],
        }
    }
    spec = merge_template(BASE, overlay)["spec"]
    assert [container["name"] for container in spec["containers"]] == ["main", "sidecar"]
    assert (spec["initContainers"], spec["imagePullSecrets"]) == ([{"name": "first"}], [{"name": "r"}])
    again = merge_template(merge_template(BASE, overlay), {"spec": {"tolerations": [{"key": "other"}]}})
    assert again["spec"]["tolerations"] == [{"key": "other"}]


def test_labels_may_be_called_like_fields_of_the_api() -> None:
    overlay = {"metadata": {"labels": {"env": "prod", "exec": "x", "ports": "none"}}}
    assert merge_template(BASE, overlay)["metadata"]["labels"] == {
        "a": "1",
        "env": "prod",
        "exec": "x",
        "ports": "none",
    }


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, r"podTemplate\.spec\.containers\[0\]: has no name"),
        ({"spec": {"containers": ["main"]}}, r"podTemplate\.spec\.containers\[0\]: has no name"),
        ({"spec": {"volumes": 3}}, r"podTemplate\.spec\.volumes: must be a list"),
        ({"spec": {"volumes": {"name": "x"}}}, r"podTemplate\.spec\.volumes: must be a list"),
        ({"spec": {"$retainKeys": ["a"]}}, r"podTemplate\.spec\.\$retainKeys: this directive is not supported"),
        ({"spec": {"$patch": "swap"}}, r"podTemplate\.spec\.\$patch: 'swap' is not known"),
    ],
)
def test_an_overlay_that_makes_no_sense_is_refused_with_its_place(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(MergeError, match=message):
        merge_template(BASE, overlay)


words = st.sampled_from(["a", "b", "c", "main", "tmp", "http"])
scalars = st.one_of(words, st.integers(0, 9), st.booleans())


def keyed(name: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    key = MERGE_KEYS[name]
    element = st.fixed_dictionaries({key: words}, optional={"value": scalars, "command": st.lists(words, max_size=2)})
    return st.lists(element, max_size=3, unique_by=lambda item: item[key])


values = st.recursive(
    scalars | st.lists(words, max_size=2) | st.none(),
    lambda inner: st.dictionaries(st.sampled_from(["x", "y", "labels", "securityContext"]), inner, max_size=3),
    max_leaves=5,
)
pod_specs = st.fixed_dictionaries(
    {},
    optional={
        "containers": keyed("containers"),
        "volumes": keyed("volumes"),
        "ports": keyed("ports"),
        "tolerations": st.lists(st.fixed_dictionaries({"key": words}), max_size=2),
        "other": values,
    },
)
overlays = st.fixed_dictionaries(
    {}, optional={"spec": pod_specs, "metadata": st.fixed_dictionaries({"labels": st.dictionaries(words, words)})}
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(overlays)
def test_an_empty_overlay_changes_nothing_and_a_base_that_is_empty_takes_all(overlay: dict[str, Any]) -> None:
    assert merge_template(BASE, {}) == BASE
    assert merge_template({}, overlay) == without_nulls(overlay)


@given(overlays.map(without_nulls), overlays)
def test_merging_twice_is_merging_once_and_changes_no_argument(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    given_base, given_overlay = copy.deepcopy(base), copy.deepcopy(overlay)
    once = merge_template(base, overlay)
    assert (base, overlay) == (given_base, given_overlay)
    assert merge_template(once, overlay) == once


@given(overlays.map(without_nulls), overlays)
def test_the_overlay_wins_and_what_it_does_not_name_stays(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    merged = merge_template(base, overlay).get("spec", {})
    ours, theirs = base.get("spec", {}), overlay.get("spec", {})
    for name, key in (("containers", "name"), ("volumes", "name"), ("ports", "containerPort")):
        elements = {item[key]: item for item in merged.get(name, [])}
        for item in theirs.get(name, []):
            assert item.items() <= elements[item[key]].items()
        for item in ours.get(name, []):
            if item[key] not in {other[key] for other in theirs.get(name, [])}:
                assert elements[item[key]] == item
    if "tolerations" in theirs:
        assert merged["tolerations"] == theirs["tolerations"]
    for name in ours.keys() - theirs.keys():
        assert merged[name] == ours[name]
