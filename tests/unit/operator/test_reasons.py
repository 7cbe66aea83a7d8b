"""The table of reasons holds every reason that the code gives, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import inflight_operator
from inflight_operator.events import ORDINARY
from inflight_operator.reasons import REASONS
from inflight_operator.refusals import _ANY_STATUS, _FORBIDDEN

PACKAGE = Path(inflight_operator.__file__).parent
SOURCES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "reasons.py")
GIVERS = {"Cause": 0, "_wait": 0, "_cause": 0}
"""Functions, and which of their arguments is a reason."""


def literals(node: ast.expr) -> Iterator[str]:
    """Strings that an expression can be."""
    for part in [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def given() -> set[str]:
    """Reasons that stand in calls."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GIVERS and node.args:
                found |= set(literals(node.args[GIVERS[node.func.id]]))
    return found


def test_every_reason_that_is_given_is_in_the_table() -> None:
    tables = {reason for _, reason, _ in (*_ANY_STATUS, *_FORBIDDEN)}
    assert given() | tables | ORDINARY <= REASONS.keys()
    assert len(given()) > 30


def test_every_reason_of_the_table_is_given() -> None:
    words = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert REASONS.keys() <= words


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_is_told_in_a_sentence_with_its_remedy(name: str) -> None:
    reason = REASONS[name]
    assert name.isalnum() and name[0].isupper()
    assert reason.meaning.endswith(".")
    assert bool(reason.remedy) == (reason.kind == "mend")
    assert not reason.remedy or reason.remedy.endswith(".")
