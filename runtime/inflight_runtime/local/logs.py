"""What a role's log file says when the role has failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from inflight_runtime.local.text import ESCAPES

READ_BYTES: Final = 256 * 1024
TAIL_LINES: Final = 15
LINE_LENGTH: Final = 400
CAUSE = re.compile(r"(?:^|[\s.])(\w*(?:Error|Exception|Interrupt))\b: \S")


def tail(path: Path, since: int = 0, lines: int = TAIL_LINES) -> list[str]:
    """Get the last lines written after byte ``since``, without colours; empty when there is no such file."""
    return _read(path, since)[-lines:]


def likely_cause(path: Path, since: int = 0) -> str | None:
    """Get the first line after byte ``since`` that names an exception.

    Servers end with "see the root cause above": the first error is worth more than the last line.
    """
    return next((line.strip() for line in _read(path, since) if CAUSE.search(line)), None)


def explain(path: Path, since: int = 0) -> str:
    """Get an indented block for a message: the last lines and, if it is not among them, the first error."""
    last = tail(path, since)
    if not last:
        return f"  (nothing in {path})"
    block = [f"  last lines of {path}:", *(f"  | {line}" for line in last)]
    cause = likely_cause(path, since)
    if cause is not None and cause not in (line.strip() for line in last):
        block.insert(0, f"  first error in it: {cause}")
    return "\n".join(block)


def _read(path: Path, since: int) -> list[str]:
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(since, handle.tell() - READ_BYTES))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    lines = (ESCAPES.sub("", line).rstrip()[:LINE_LENGTH] for line in text.splitlines())
    return [line for line in lines if line]
