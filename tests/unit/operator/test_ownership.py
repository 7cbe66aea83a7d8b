"""Field ownership after a POST, before the first apply."""

from __future__ import annotations

import copy
from typing import Any

from inflight_operator.ownership import as_applied

US = "inflight-operator"


def entry(operation: str, fields: dict[str, Any], manager: str = US, **more: str) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "fieldsType": "FieldsV1", "fieldsV1": fields, **more}


SPEC = {"f:spec": {"f:a": {}, "f:list": {'k:{"name":"x"}': {".": {}, "f:v": {}}}}}
THEIRS = [
    entry("Update", {"f:status": {}}, manager="kube-controller-manager", subresource="status"),
    entry("Apply", {"f:metadata": {"f:labels": {"f:theirs": {}}}}, manager="argocd"),
    entry("Update", {"f:status": {"f:x": {}}}, subresource="status"),
]


def test_what_was_posted_becomes_what_was_applied() -> None:
    managed = [entry("Update", SPEC), *THEIRS]
    before = copy.deepcopy(managed)
    assert as_applied(managed, US) == [*THEIRS, entry("Apply", SPEC)]
    assert managed == before


def test_two_entries_of_ours_become_one_that_owns_all_that_either_owned() -> None:
    applied = {"f:spec": {"f:b": {}, "f:list": {'k:{"name":"y"}': {}}}}
    merged = as_applied([entry("Update", SPEC), *THEIRS, entry("Apply", applied)], US)
    assert merged is not None and merged[:-1] == THEIRS
    lists = {**SPEC["f:spec"]["f:list"], 'k:{"name":"y"}': {}}
    assert merged[-1] == entry("Apply", {"f:spec": {"f:a": {}, "f:b": {}, "f:list": lists}})


def test_nothing_has_to_change_when_all_was_applied_or_nothing_is_ours() -> None:
    assert as_applied([*THEIRS, entry("Apply", SPEC)], US) is None
    assert as_applied(THEIRS, US) is None
    assert as_applied([], US) is None


def test_doing_it_twice_changes_nothing_more() -> None:
    once = as_applied([entry("Update", SPEC), *THEIRS], US)
    assert once is not None
    assert as_applied(once, US) is None
