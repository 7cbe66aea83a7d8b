"""Writes docs/job-reference.md from the models of the custom resource; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from inflight_runtime.api import JobStatus, Metadata, RLTrainingSpec, show
from inflight_runtime.api.errors import bounds_of, inner_model

TARGET = Path(__file__).resolve().parents[1] / "docs" / "job-reference.md"
USERS_METADATA = ("name", "namespace", "labels", "annotations")
COMPUTED = {
    "isCap": "2, or null with ppo",
    "clipLow": "0.2 with ppo",
    "clipHigh": "0.2 with ppo",
    "replicas": "one to begin with",
    "concurrency": "from the servers",
    "microBatchTokens": "at least 8192",
    "betas": "[0.9, 0.95]",
    "accessModes": '["ReadWriteOnce"]',
}
INTRO = """\
# The job file

<!-- Made by scripts/make_job_reference.py from runtime/inflight_runtime/api. Change the models, then run it again. -->

One file describes one run: `apiVersion: inflight.dev/v1alpha1`, `kind: RLTrainingJob`, `metadata`, `spec`. The same
file runs on one machine (`inflight run job.yaml`) and in a cluster (`kubectl apply -f job.yaml`); fields that mean
something in a cluster only say so. `inflight validate job.yaml` checks it. Unknown fields, wrong types and combinations
that cannot work are refused before anything starts.

The smallest job:

```yaml
apiVersion: inflight.dev/v1alpha1
kind: RLTrainingJob
metadata:
  name: sort-letters
spec:
  model:
    source: ./model
  environment:
    entrypoint: environment:SortLetters
  algorithm:
    steps: 500
  sampling:
    maxTokens: 256
```

A bold field is required; everything else may be left out. In a field "none" stands for the absence of a value.
"""


def type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is list:
        return f"list of {type_name(parts[0])}"
    if get_origin(annotation) is dict:
        return "map" if Any in parts else f"map to {type_name(parts[1])}"
    if inner_model(annotation) is not None:
        return "section"
    if parts:
        nullable = type(None) in get_args(annotation)
        return type_name(parts[0]) + (" or null" if nullable else "")
    return {int: "whole number", float: "number", str: "text", bool: "true \\| false", dict: "map"}[annotation]


def default_of(name: str, field: FieldInfo, section: bool) -> str:
    if field.is_required():
        return "**required**"
    if section:
        return ""
    if name in COMPUTED:
        return COMPUTED[name]
    if field.default is PydanticUndefined:
        assert field.default_factory in (list, dict), f"{name}: say in COMPUTED what the default is"
        return "none"
    return "none" if field.default in (None, "") else f"`{show(field.default)}`"


def rows(model: type[BaseModel], path: str, told: dict[type[BaseModel], str], only: tuple[str, ...] = ()) -> list[str]:
    lines = ["| field | type | default | bounds | what it is |", "| --- | --- | --- | --- | --- |"]
    # What a section shares with others comes last.
    fields = sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__)
    for attribute, field in fields:
        name = field.alias or attribute
        if only and name not in only:
            continue
        shown = f"**`{name}`**" if field.is_required() else f"`{name}`"
        inner = inner_model(field.annotation)
        kind = type_name(field.annotation)
        if inner is not None and told.setdefault(inner, f"{path}.{name}") != f"{path}.{name}":
            kind += f" (see `{told[inner]}`)"
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        cells = (shown, kind, default_of(name, field, inner is not None), bounds_of(field), text)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def section(model: type[BaseModel], path: str, told: dict[type[BaseModel], str]) -> list[str]:
    lines = [f"## `{path}`", "", " ".join((model.__doc__ or "").split()), "", *rows(model, path, told), ""]
    for attribute, field in model.model_fields.items():
        inner = inner_model(field.annotation)
        if inner is not None and told[inner] == f"{path}.{field.alias or attribute}":
            lines += section(inner, told[inner], told)
    return lines


def reference() -> str:
    told: dict[type[BaseModel], str] = {}
    metadata = ["## `metadata`", "", *rows(Metadata, "metadata", told, USERS_METADATA), ""]
    spec, status = section(RLTrainingSpec, "spec", told), section(JobStatus, "status", told)
    return "\n".join([INTRO, *metadata, *spec, *status]).rstrip() + "\n"


def main() -> int:
    text = reference()
    if sys.argv[1:] == ["--check"]:
        same = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'up to date' if same else 'out of date: run scripts/make_job_reference.py'}")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
