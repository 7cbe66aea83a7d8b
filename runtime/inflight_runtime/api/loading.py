"""Reading a job file: YAML in, a checked :class:`~.job.RLTrainingJob` or one :class:`~.errors.JobError` out."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from .errors import JobError, Problem, field_path, problems_from, show
from .job import KIND, RLTrainingJob

MAX_BYTES: Final = 1024 * 1024
"""Largest job file; an API server stores no larger object either."""

Lines = dict[tuple[str | int, ...], int]


class _JobLoader(yaml.SafeLoader):
    """YAML as kubectl reads it: ``1e-6`` is a number, a date and ``1:30`` are text."""


# PyYAML follows YAML 1.1 to the letter: "1e-6" has no dot and so is text, "1:30" is the number 90, dates are objects.
_JobLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _JobDumper(yaml.SafeDumper):
    """Quotes every text that kubectl, or a reader of YAML 1.1, would take for something else."""


# Go's words for numbers: underscores anywhere behind the first digit, octal with a leading 0, and 08 is a decimal.
_INTEGER: Final = re.compile(
    r"^[-+]?(0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|0[bB]_*[01][01_]*|0[oO]_*[0-7][0-7_]*|0[0-7_]*|[1-9][0-9_]*)$"
)
_FLOAT: Final = re.compile(
    r"^([-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9][0-9_]*)?|[-+]\.[0-9][0-9_]*([eE][-+]?[0-9][0-9_]*)?"
    r"|\.[0-9]+([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_JobLoader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
for _yaml in (_JobLoader, _JobDumper):
    # To kubectl a bare n is false.
    _yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))
    _yaml.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "").lower()
    digits = text.lstrip("-+")
    return int(text, 8 if digits.isdigit() and digits.startswith("0") else 0)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    # JSON writes characters beyond the first 65536 as two escapes, which PyYAML leaves as two halves.
    text = str(loader.construct_scalar(node))
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.constructor.ConstructorError(
            None, None, "half a character (\\ud800...\\udfff)", node.start_mark
        ) from None


for _tag in ("str", "value", "merge"):  # a bare = or << is text where it is no key
    _JobLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct_text)
_JobLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_JobLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Rare line breaks are escaped in double quotes only; in any other style they are folded away.
    style = '"' if set(text) & set("\x85\u2028\u2029") else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_JobDumper.add_representer(str, _represent_text)


def dump_yaml(data: Any) -> str:
    """Write plain data as YAML that :func:`read_yaml`, kubectl and PyYAML read back alike."""
    return yaml.dump(data, Dumper=_JobDumper, sort_keys=False, allow_unicode=True)


def load_job(path: Path | str) -> RLTrainingJob:
    """Read and check a job file.

    Raises:
        JobError: it cannot be read, or is no job that can work.
    """
    path = Path(path)
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            size = f"is {path.stat().st_size} bytes long, over the limit of {MAX_BYTES}"
            raise JobError([Problem("", None, size, "give a job file, not a data file")], str(path))
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(
            [Problem("", None, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8")], str(path)
        ) from None
    except OSError as error:
        remedy = "give the path of a job file, for instance examples/sort-letters/job.yaml"
        reason = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise JobError([Problem("", None, reason, remedy)], str(path)) from None
    return parse_job(text, str(path))


def parse_job(text: str, where: str) -> RLTrainingJob:
    """Read and check the text of a job file.

    Args:
        text: YAML (JSON is YAML too).
        where: name of its source, for messages.

    Raises:
        JobError: it is no job that can work.
    """
    data, lines = read_yaml(text, where)
    return validate_job(data, where, lines)


def validate_job(data: object, where: str, lines: Lines | None = None) -> RLTrainingJob:
    """Check a job that has been read already, for instance from the API server.

    Args:
        data: plain data under wire names.
        where: name of its source, for messages.
        lines: line of each path, if it came from a file.

    Raises:
        JobError: it is no job that can work.
    """
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        reason = f"holds {kind}, not a job"
        raise JobError([Problem("", None, reason, f"begin with apiVersion, kind: {KIND}, metadata and spec")], where)
    if isinstance(data.get("kind"), str) and data["kind"] != KIND:
        # Everything else would only be noise: this is another kind of object.
        problem = Problem(
            "kind", show(data["kind"]), f"must be {KIND}", f"give the file of an {KIND}", (lines or {}).get(("kind",))
        )
        raise JobError([problem], where)
    try:
        return RLTrainingJob.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise JobError(problems_from(error, RLTrainingJob, lines), where) from None


def read_yaml(text: str, where: str) -> tuple[Any, Lines]:
    """Read the one YAML document of a job file without checking what it says.

    Args:
        text: YAML (JSON is YAML too).
        where: name of its source, for messages.

    Returns:
        Plain data (``None`` for an empty text) and the line of every path in it.

    Raises:
        JobError: it is no YAML, or no single document.
    """
    loader: _JobLoader | None = None
    try:
        loader = _JobLoader(text)
        documents: list[yaml.Node] = []
        while loader.check_node():
            document = loader.get_node()
            if document is not None and not _is_empty(document):
                documents.append(document)
        if len(documents) > 1:
            problem = Problem(
                "",
                None,
                f"holds {len(documents)} YAML documents",
                f"keep the {KIND} in a file of its own",
                documents[1].start_mark.line + 1,
            )
            raise JobError([problem], where)
        if not documents:
            return None, {}
        lines: Lines = {}
        problems: list[Problem] = []
        _walk(documents[0], (), lines, problems, set())
        if problems:
            raise JobError(problems, where)
        return loader.construct_document(documents[0]), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" in column {mark.column + 1}"
        reason = f"is not valid YAML{place}: {error.problem or error.context}"
        problem = Problem("", None, reason, _yaml_remedy(error), None if mark is None else mark.line + 1)
        raise JobError([problem], where) from None
    except yaml.reader.ReaderError as error:
        reason = f"is not valid YAML: the character {error.character!r} at position {error.position} is not allowed"
        raise JobError([Problem("", None, reason, "remove it")], where) from None
    except ValueError as error:
        raise JobError([Problem("", None, f"is not valid YAML: {error}", "mend the value")], where) from None
    except RecursionError:
        raise JobError([Problem("", None, "is nested too deeply", "flatten it")], where) from None
    finally:
        if loader is not None:
            loader.dispose()


def _yaml_remedy(error: yaml.MarkedYAMLError) -> str:
    words = error.problem or ""
    if "\\t" in words:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in words:
        return "check the indentation, and put text that contains ': ' in quotes"
    if "could not determine a constructor" in words:
        return "remove the tag (!...)"
    return "check indentation, quotes and brackets there"


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _walk(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, problems: list[Problem], above: set[int]) -> None:
    """Note the line of every path, and find keys that are given twice (PyYAML would silently take the last)."""
    if id(node) in above:
        return
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[*path, number] = item.start_mark.line + 1
            _walk(item, (*path, number), lines, problems, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Hashable, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem(field_path(path), None, "has a key that is not text", "write a plain name", line))
            continue
        here = (*path, key.value)
        if key.value in seen:
            first = f"is given twice, here and in line {seen[key.value]}"
            problems.append(Problem(field_path(here), None, first, "keep one of the two", line))
        seen[key.value] = line
        lines[here] = line
        _walk(value, here, lines, problems, above)
