"""Whether a live object still is what we asked for. Pure.

The API server adds defaults and writes some values its own way (``1000m`` becomes ``1``), so what is asked is whether
everything in the desired manifest can be found in the live object; what others have added is theirs.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

from inflight_operator.builders import Manifest
from inflight_operator.merge import MERGE_KEYS

QUANTITIES: Final = frozenset({"requests", "limits", "sizeLimit"})
"""Fields whose values, or the values below them, are quantities."""
KEYS: Final = {**MERGE_KEYS, "ownerReferences": "uid"}
_QUANTITY: Final = re.compile(r"^\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([KMGTPE]i)|([munkMGTPE])|[eE]([+-]?[0-9]+))?$")
_POWERS: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def drift(desired: Manifest, live: Manifest) -> str:
    """Path of the first field that differs, empty when nothing does.

    Compared are labels, annotations, owners and everything outside of ``metadata`` and ``status``.
    """
    wanted = {name: value for name, value in desired.items() if name not in ("apiVersion", "kind", "metadata")}
    metadata, below = desired["metadata"], live.get("metadata", {})
    for part in ("labels", "annotations", "ownerReferences"):
        if part in metadata and (found := _differs(metadata[part], below.get(part), f"metadata.{part}", part)):
            return found
    return _differs(wanted, live, "", "")


def _differs(desired: Any, live: Any, where: str, field: str) -> str:
    if _empty(desired) and _empty(live):
        return ""
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return where
        for name, value in desired.items():
            # Below requests and limits the names are resources, and every value is a quantity.
            inside = field if field in QUANTITIES else name
            place = f"{where}.{name}" if where else name
            if found := _differs(value, live.get(name), place, inside):
                return found
        return ""
    if isinstance(desired, list):
        return _lists_differ(desired, live, where, field)
    if field in QUANTITIES and quantity(desired) == quantity(live) is not None:
        return ""
    return "" if type(desired) is type(live) and desired == live else where


def _lists_differ(desired: list[Any], live: Any, where: str, field: str) -> str:
    if not isinstance(live, list):
        return where
    key = KEYS.get(field)
    if key is not None and all(isinstance(element, dict) and key in element for element in desired):
        present = {element.get(key): element for element in live if isinstance(element, dict)}
        pairs = [(element, present.get(element[key]), f"{where}[{element[key]}]") for element in desired]
    else:
        if len(desired) != len(live):
            return where
        pairs = [(one, other, f"{where}[{i}]") for i, (one, other) in enumerate(zip(desired, live, strict=True))]
    return next((found for one, other, place in pairs if (found := _differs(one, other, place, ""))), "")


def _empty(value: Any) -> bool:
    # The API server leaves out what has no value.
    return value is None or value is False or value in ("", [], {})


def quantity(value: Any) -> Decimal | None:
    """A Kubernetes quantity as a number; ``None`` when it is none."""
    found = _QUANTITY.match(str(value))
    if found is None:
        return None
    number, binary, power, exponent = found.groups()
    if binary:
        return Decimal(number) * Decimal(1024) ** ("KMGTPE".index(binary[0]) + 1)
    return Decimal(number).scaleb(int(exponent) if exponent else _POWERS.get(power or "", 0))
