"""The part of a pod template overlay that a run depends on; all else in it is between its author and the API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from .errors import Problem, show

RESERVED_ENV: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "NODE_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Set by torchrun, JobSet or the operator."""
RESERVED_ENV_PREFIXES: Final = ("PET_", "INFLIGHT_")
RESERVED_LABELS: Final = tuple(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by"))
"""Selectors and the operator's watch use these labels."""
RESERVED_LABEL_PREFIXES: Final = ("inflight.dev/", "jobset.sigs.k8s.io/")
MAX_CONTAINERS: Final = 16
MAX_ENV: Final = 256
MAX_LABELS: Final = 64
MAX_TEXT: Final = 4096
"""Longest text looked at: rules on a longer one would cost the API server too much."""
ANOTHER_NAME: Final = (
    f"choose another name ({', '.join(RESERVED_LABELS)}, {', '.join(f'{each}*' for each in RESERVED_LABEL_PREFIXES)} "
    "are the operator's own)"
)


def without_nulls(overlay: dict[str, Any]) -> dict[str, Any]:
    """The overlay without the nulls that the API server drops: those of the fields it knows of."""
    kept = _without(overlay, "metadata", "spec")
    if isinstance(kept.get("metadata"), dict):
        kept["metadata"] = _without(kept["metadata"], "labels")
        if isinstance(kept["metadata"].get("labels"), dict):
            labels = kept["metadata"]["labels"]
            kept["metadata"]["labels"] = _without(labels, *labels)
    if isinstance(kept.get("spec"), dict):
        kept["spec"] = _without(kept["spec"], "containers", "initContainers")
        for name in ("containers", "initContainers"):
            if isinstance(containers := kept["spec"].get(name), list):
                kept["spec"][name] = [_named(item) for item in containers]
    return kept


def find_overlay_problems(overlay: dict[str, Any], where: str) -> Iterator[Problem]:
    """What the API server refuses in an overlay.

    Args:
        overlay: a partial PodTemplateSpec without nulls, see :func:`without_nulls`.
        where: path of the overlay.
    """
    for name, check in (("metadata", _metadata), ("spec", _spec)):
        part = overlay.get(name, {})
        if isinstance(part, dict):
            yield from check(part, f"{where}.{name}")
        else:
            yield _kind(f"{where}.{name}", part, "a map of fields")


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None or name not in names}


def _named(container: Any) -> Any:
    if not isinstance(container, dict):
        return container
    container = _without(container, "name", "env")
    if isinstance(container.get("env"), list):
        container["env"] = [_without(item, "name") if isinstance(item, dict) else item for item in container["env"]]
    return container


def _metadata(metadata: dict[str, Any], where: str) -> Iterator[Problem]:
    labels = metadata.get("labels", {})
    where = f"{where}.labels"
    if not isinstance(labels, dict):
        yield _kind(where, labels, "a map of fields")
        return
    if len(labels) > MAX_LABELS:
        yield Problem(where, show(labels), f"is longer than {MAX_LABELS} entries", "shorten it")
    for label, value in labels.items():
        place = f"{where}.{label}"
        yield from _text(value, place)
        if label in RESERVED_LABELS or label.startswith(RESERVED_LABEL_PREFIXES):
            yield Problem(place, show(value), "selectors and the operator use this label", ANOTHER_NAME)


def _spec(spec: dict[str, Any], where: str) -> Iterator[Problem]:
    for name in ("containers", "initContainers"):
        yield from _elements(spec, name, where, MAX_CONTAINERS, _container)


def _container(container: dict[str, Any], where: str) -> Iterator[Problem]:
    yield from _elements(container, "env", where, MAX_ENV, _variable)


def _variable(variable: dict[str, Any], where: str) -> Iterator[Problem]:
    name = variable.get("name")
    if isinstance(name, str) and (name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)):
        yield Problem(where, show(name), "is set by the run itself", "remove it")


def _elements(
    owner: dict[str, Any],
    name: str,
    where: str,
    most: int,
    check: Callable[[dict[str, Any], str], Iterator[Problem]],
) -> Iterator[Problem]:
    """What is wrong with a list of named objects, if there is one."""
    elements = owner.get(name, [])
    where = f"{where}.{name}"
    if not isinstance(elements, list):
        yield _kind(where, elements, "a list")
        return
    if len(elements) > most:
        yield Problem(where, show(elements), f"is longer than {most} entries", "shorten it")
    for number, element in enumerate(elements):
        place = f"{where}[{number}]"
        if not isinstance(element, dict):
            yield _kind(place, element, "a map of fields")
        elif "name" not in element:
            yield Problem(place, show(element), "has no name, by which it is merged", "add it")
        else:
            yield from _text(element["name"], f"{place}.name")
            yield from check(element, place)


def _text(value: Any, where: str) -> Iterator[Problem]:
    if not isinstance(value, str):
        yield _kind(where, value, "text")
    elif len(value) > MAX_TEXT:
        yield Problem(where, show(value), f"is longer than {MAX_TEXT} characters", "shorten it")


def _kind(where: str, value: Any, wanted: str) -> Problem:
    return Problem(where, show(value), f"must be {wanted}", "write it as in a PodTemplateSpec")
