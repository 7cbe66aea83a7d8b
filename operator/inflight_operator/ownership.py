"""Who owns which field of an object, as far as server-side apply is concerned. Pure.

An object that was made by POST is owned by an entry with the operation ``Update``. A later apply of the same manager
gets an entry of its own and would not remove a field that the first one still owns: a variable that is gone from a
job's spec would stay in its pods. So both are made one before the first apply, as client-go's ``csaupgrade`` does.
"""

from __future__ import annotations

import copy
from typing import Any

from inflight_operator.builders import Manifest


def as_applied(managed: list[Manifest], manager: str) -> list[Manifest] | None:
    """``metadata.managedFields`` with all that ``manager`` owns in its one ``Apply`` entry.

    Args:
        managed: the list as it is.
        manager: name of the field manager.

    Returns:
        The new list, or ``None`` when nothing has to change.
    """
    ours = [entry for entry in managed if entry.get("manager") == manager and not entry.get("subresource")]
    updates = [entry for entry in ours if entry.get("operation") == "Update"]
    if not updates:
        return None
    applied = next((entry for entry in ours if entry.get("operation") == "Apply"), None)
    base = copy.deepcopy(applied or {**updates[0], "operation": "Apply"})
    fields: dict[str, Any] = base.get("fieldsV1") or {}
    for entry in updates:
        fields = _union(fields, entry.get("fieldsV1") or {})
    base["fieldsV1"] = fields
    return [entry for entry in managed if entry not in ours] + [base]


def _union(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for name, value in other.items():
        present = merged.get(name)
        both = isinstance(present, dict) and isinstance(value, dict)
        merged[name] = _union(present, value) if both and isinstance(present, dict) else copy.deepcopy(value)
    return merged
