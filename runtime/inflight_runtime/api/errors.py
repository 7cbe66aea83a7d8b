"""What is wrong with a job, said so that a person can mend it: where, which value, why, and what to do."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

MAX_SHOWN: Final = 80
"""Characters of a value that are shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        field: dotted path under its wire names, for instance ``spec.algorithm.groupSize``; empty for the whole file.
        value: what stands there, as :func:`show` writes it; ``None`` when nothing does.
        reason: why it is refused; reads on from the field's name.
        remedy: what to do about it, in the imperative.
        line: line of the job file, from 1, when known.
    """

    field: str
    value: str | None
    reason: str
    remedy: str
    line: int | None = None

    def __str__(self) -> str:
        what = f"{self.field}: {self.reason}" if self.field else self.reason
        got = "" if self.value is None else f" (got {self.value})"
        return f"{what}{got}; {self.remedy}"


class JobError(Exception):
    """A job cannot be read or cannot work. ``str()`` is the whole message for the user.

    Attributes:
        problems: at least one.
        where: the file, or another name for the source.
    """

    def __init__(self, problems: Sequence[Problem], where: str = "") -> None:
        self.problems = tuple(problems)
        self.where = where
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            problem = self.problems[0]
            place = self.where if problem.line is None else f"{self.where}:{problem.line}"
            return f"{place}: {problem}" if place else str(problem)
        head = f"{self.where}: " if self.where else ""
        lines = [
            f"  {problem}" if problem.line is None else f"  line {problem.line}: {problem}" for problem in self.problems
        ]
        return "\n".join([f"{head}{len(self.problems)} problems", *lines])


def show(value: object) -> str:
    """A value as a job file would have it, in one line and shortened."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def contradiction(problems: Sequence[Problem]) -> PydanticCustomError:
    """An error that carries finished problems out of a model validator."""
    return PydanticCustomError(
        "contradiction", "{text}", {"text": "\n".join(map(str, problems)), "problems": tuple(problems)}
    )


def problems_from(
    error: ValidationError, root: type[BaseModel], lines: Mapping[tuple[str | int, ...], int] | None = None
) -> list[Problem]:
    """Turn pydantic's errors about ``root`` into problems.

    Args:
        error: what validation raised.
        root: the model that was validated.
        lines: line of each path of the source, to be named in the problems.
    """
    problems: list[Problem] = []
    for details in error.errors(include_url=False):
        found = details.get("ctx", {}).get("problems")
        if details["type"] == "contradiction" and isinstance(found, tuple):
            problems.extend(replace(item, line=_line_of_field(item.field, lines or {})) for item in found)
        elif details["type"] != "default_factory_not_called":  # a consequence of an error that is in the list itself
            problem = _explain(details, root)
            problems.append(replace(problem, line=_line(details["loc"], lines or {})))
    return sorted(problems, key=lambda problem: problem.line or 0)


def field_path(loc: Sequence[str | int]) -> str:
    """``("spec", "sampling", "stop", 0)`` as ``spec.sampling.stop[0]``."""
    path = ""
    for part in loc:
        if part == "[key]":
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _line(loc: Sequence[str | int], lines: Mapping[tuple[str | int, ...], int]) -> int | None:
    for length in range(len(loc), 0, -1):
        line = lines.get(tuple(loc[:length]))
        if line is not None:
            return line
    return None


def _line_of_field(field: str, lines: Mapping[tuple[str | int, ...], int]) -> int | None:
    parts = filter(None, re.split(r"[].[]+", field))
    return _line([int(part) if part.isdigit() else part for part in parts], lines)


# --- from pydantic's words to ours ------------------------------------------------------------------------------------

_KINDS: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map of fields",
    "model_type": "a map of fields",
}


_BOUNDS: Final = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def _explain(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    kind, loc, value = details["type"], details["loc"], details.get("input")
    ctx: dict[str, Any] = details.get("ctx", {})
    path, shown = field_path(loc), show(value)
    field, _ = _find(root, loc)
    if kind == "invalid_key" or (loc and loc[-1] == "[key]"):
        key = loc[-1] if kind == "invalid_key" else loc[-2]
        return Problem(path, None, "the key must be text", f'write it in quotes: "{key}"')
    if kind == "extra_forbidden":
        _, owner = _find(root, loc[:-1])
        return Problem(path, shown, "unknown field", suggest_field(str(loc[-1]), owner or root, root, loc[:-1]))
    if kind == "missing":
        return Problem(path, None, "is required", f"add it: {_about(field)}")
    if kind in _KINDS:
        return Problem(path, shown, f"must be {_KINDS[kind]}", _type_remedy(kind, value, field))
    if kind == "literal_error":
        choices = _choices(field)
        near = _closest(str(value), choices)
        return Problem(
            path, shown, f"must be {_either(choices)}", f"did you mean {near}?" if near else f"write {_either(choices)}"
        )
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return Problem(path, shown, f"{words} {ctx[key]}", f"choose {_range(field)} ({_about(field)})")
    if kind == "finite_number":
        return Problem(path, shown, "must be a finite number", f"choose {_range(field)} ({_about(field)})")
    if kind == "string_pattern_mismatch":
        return Problem(path, shown, "is not written as it must be", f"expected: {_about(field)}{_example(field)}")
    if kind in ("string_too_long", "too_long"):
        limit, unit = ctx["max_length"], "characters" if kind.startswith("string") else "entries"
        return Problem(path, shown, f"is longer than {limit} {unit}", "shorten it")
    if kind in ("string_too_short", "too_short"):
        limit, unit = ctx["min_length"], "characters" if kind.startswith("string") else "entries"
        return Problem(
            path,
            shown,
            "is empty" if limit == 1 else f"has fewer than {limit} {unit}",
            f"expected: {_about(field)}{_example(field)}",
        )
    if kind == "refused":
        return Problem(path, shown, str(ctx["reason"]), str(ctx["remedy"]))
    return Problem(path, shown, details["msg"], f"expected: {_about(field)}")


def _type_remedy(kind: str, value: object, field: FieldInfo | None) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None:
        return "give a value, or remove the line"
    if kind == "string_type" and (number or isinstance(value, bool)):
        return f'write it in quotes: "{show(value)}"'
    if isinstance(value, str) and kind in ("int_type", "float_type") and _is_number(value):
        return f"write it without quotes: {value.strip()}"
    if isinstance(value, str) and kind == "bool_type" and value.lower() in ("true", "false"):
        return f"write it without quotes: {value.lower()}"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "list_type":
        return f"write it as a list: [{show(value)}]"
    return f"expected: {_about(field)}{_example(field)}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _about(field: FieldInfo | None) -> str:
    """The first sentence of a field's description, to end a message with."""
    text = " ".join((field.description or "").split()) if field else ""
    return text.split(". ")[0].rstrip(".") or "see docs/job-reference.md"


def bounds_of(field: FieldInfo) -> str:
    """The bounds of a field in words (``above 0, at most 10``), empty when it has none."""
    words: list[str] = []
    for limit in field.metadata:
        words += [
            f"{text.removeprefix('must be ')} {value}"
            for text, name in _BOUNDS.values()
            if (value := getattr(limit, name, None)) is not None
        ]
    return ", ".join(words)


def _range(field: FieldInfo | None) -> str:
    bounds = bounds_of(field) if field else ""
    return f"a value {bounds}" if bounds else "another value"


def _example(field: FieldInfo | None) -> str:
    return f", for instance {field.examples[0]}" if field and field.examples else ""


def _either(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + f" or {choices[-1]}"


def _closest(word: str, choices: Sequence[str]) -> str | None:
    plain = {_plain(choice): choice for choice in choices}
    near = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def suggest_field(name: str, owner: type[BaseModel], root: type[BaseModel], at: Sequence[str | int]) -> str:
    """Say which field was meant by an unknown ``name`` in ``owner``, at path ``at`` of ``root``."""
    known = wire_names(owner)
    same = next((field for field in known if _plain(field) == _plain(name)), None)
    if same:
        return f"did you mean {same}?"
    elsewhere = [path for path in _all_paths(root) if _plain(path[-1]) == _plain(name) and path[0] != "status"]
    if elsewhere:
        nearest = max(elsewhere, key=lambda path: (_common(path, at), -len(path)))
        return (
            f"it belongs under {field_path(nearest[:-1])}, as {nearest[-1]}" if nearest[:-1] else "move it to the top"
        )
    near = _closest(name, known)
    return f"did you mean {near}?" if near else f"known here: {', '.join(known)}"


def wire_names(model: type[BaseModel]) -> list[str]:
    """The names of a model's fields in a job file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _common(path: Sequence[str], at: Sequence[str | int]) -> int:
    count = 0
    for left, right in zip(path, at, strict=False):
        if left != right:
            break
        count += 1
    return count


def _all_paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        path = (*above, field.alias or name)
        yield path
        inner = inner_model(field.annotation)
        if inner is not None:
            yield from _all_paths(inner, path)


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as ``Model | None`` or ``list[Model]``; ``None`` when there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := inner_model(part)) is not None), None)


def _find(root: type[BaseModel], loc: Sequence[str | int]) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """The field at ``loc``, and the model that its value is, if it is one."""
    field: FieldInfo | None = None
    model: type[BaseModel] | None = root
    for part in loc:
        if isinstance(part, int):
            continue
        if model is None:
            return field, None
        field = next((info for name, info in model.model_fields.items() if part in (info.alias, name)), None)
        if field is None:
            return None, None
        model = inner_model(field.annotation)
    return field, model


def _choices(field: FieldInfo | None) -> list[str]:
    def literals(annotation: Any) -> Iterator[str]:
        if get_origin(annotation) is Literal:
            yield from map(str, get_args(annotation))
        else:
            for part in get_args(annotation):
                yield from literals(part)

    return list(literals(field.annotation)) if field else []
