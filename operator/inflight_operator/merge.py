"""Strategic merge of a partial pod template into one that was built, by the rules of ``kubectl patch``.

Objects are merged field by field and ``null`` removes a field. Lists whose elements have a key (``containers`` by
name, ``volumeMounts`` by path, ...) are merged element by element; all other lists are replaced. ``$patch: delete``
removes an element or object, ``$patch: replace`` takes it as it is.
"""

from __future__ import annotations

import copy
from typing import Any, Final

MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""Merge keys of the lists in a PodTemplateSpec."""
EITHER_OR: Final = frozenset({"env", "volumes"})
"""Lists whose elements are unions: a source given in the overlay replaces the one that was there."""
HANDLERS: Final = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
"""A probe or hook has one of these; giving another one replaces it."""
FREE_MAPS: Final = frozenset(
    {"labels", "annotations", "nodeSelector", "matchLabels", "limits", "requests", "volumeAttributes", "options"}
)
"""Maps whose keys are the user's: no field of the API is looked for in them."""


class MergeError(ValueError):
    """An overlay that cannot be merged; the message names the place in it."""


def merge_template(base: dict[str, Any], overlay: dict[str, Any], where: str = "podTemplate") -> dict[str, Any]:
    """Merge ``overlay`` into ``base``; neither is changed.

    Args:
        base: a PodTemplateSpec.
        overlay: a partial one.
        where: name of the overlay, for messages.

    Raises:
        MergeError: an element of a keyed list has no key, a list is no list, or a directive is unknown.
    """
    return _merge_object(base, overlay, where)


def _merge_object(base: dict[str, Any], overlay: dict[str, Any], where: str, *, free: bool = False) -> dict[str, Any]:
    directive = overlay.get("$patch")
    if directive == "replace":
        return {name: copy.deepcopy(value) for name, value in overlay.items() if name != "$patch"}
    if directive not in (None, "merge"):
        raise MergeError(f"{where}.$patch: {directive!r} is not known here; write replace or delete")
    merged = copy.deepcopy(base)
    if not free and HANDLERS & overlay.keys():
        merged = {name: value for name, value in merged.items() if name not in HANDLERS or name in overlay}
    for name, value in overlay.items():
        place = f"{where}.{name}"
        if name == "$patch":
            continue
        if name.startswith("$"):
            raise MergeError(f"{place}: this directive is not supported; use $patch: delete or replace")
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            merged.pop(name, None)
        elif name in MERGE_KEYS and not free:
            below = merged.get(name)
            merged[name] = _merge_list(below if isinstance(below, list) else [], value, name, place)
        elif isinstance(value, dict):
            below = merged.get(name)
            inside = free or name in FREE_MAPS
            merged[name] = _merge_object(below if isinstance(below, dict) else {}, value, place, free=inside)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _merge_list(base: list[Any], overlay: Any, name: str, where: str) -> list[Any]:
    if not isinstance(overlay, list):
        raise MergeError(f"{where}: must be a list")
    key = MERGE_KEYS[name]
    merged = [] if any(element == {"$patch": "replace"} for element in overlay) else copy.deepcopy(base)
    for number, element in enumerate(overlay):
        place = f"{where}[{number}]"
        if element == {"$patch": "replace"}:
            continue
        if not isinstance(element, dict) or key not in element:
            raise MergeError(f"{place}: has no {key}, by which it is merged")
        at = next((index for index, present in enumerate(merged) if present.get(key) == element[key]), None)
        if element.get("$patch") == "delete":
            if at is not None:
                del merged[at]
        elif at is None:
            merged.append(_merge_object({}, element, place))
        else:
            present = merged[at]
            if name in EITHER_OR:
                present = {field: value for field, value in present.items() if field in element}
            merged[at] = _merge_object(present, element, place)
    return merged
