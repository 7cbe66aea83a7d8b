"""``--set path=value``: one field of a job changed from the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from inflight_runtime.api import JobError, Problem, RLTrainingJob, load_job, validate_job
from inflight_runtime.api.loading import dump_yaml, read_yaml

PATH: Final = re.compile(r"^[A-Za-z][\w-]*(\.[A-Za-z_][\w-]*)*$")
EXAMPLE: Final = "write --set spec.algorithm.steps=100"


def load_with_overrides(path: Path, overrides: Sequence[str]) -> RLTrainingJob:
    """Read a job file, change the fields that ``overrides`` name, and check the whole.

    Args:
        path: the job file.
        overrides: ``path=value`` each; the value is YAML, and ``null`` takes the field out.

    Raises:
        JobError: the file or an override cannot be read, or the job that results cannot work.
    """
    if not overrides:
        return load_job(path)
    load_job(path)  # what is wrong in the file itself is told with its lines
    data, _ = read_yaml(path.read_bytes().decode("utf-8-sig"), str(path))
    return validate_job(apply(data, overrides), f"{path} with --set {' --set '.join(overrides)}")


def apply(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Get a copy of a job's plain data with the overrides in it.

    Raises:
        JobError: an override is not ``path=value`` or leads through something that is no map.
    """
    changed = copy.deepcopy(data)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or PATH.match(path) is None:
            raise JobError([Problem("--set", override, "is not path=value", EXAMPLE)])
        value, _ = read_yaml(text, f"--set {path}")
        *above, last = path.split(".")
        node = changed
        for depth, name in enumerate(above):
            below = node.get(name)
            if below is None:
                below = node[name] = {}
            if not isinstance(below, dict):
                place = ".".join(above[: depth + 1])
                raise JobError([Problem("--set", override, f"{place} is a value and has no fields", EXAMPLE)])
            node = below
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return changed


def dump(data: dict[str, Any]) -> str:
    """Write a job's plain data as YAML."""
    return dump_yaml(data)
