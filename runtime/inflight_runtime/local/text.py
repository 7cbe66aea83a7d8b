"""Small pieces of text for a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def clock_text(seconds: float) -> str:
    """``75`` as ``1:15``, ``3700`` as ``1:01:40``."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_text(text: str) -> str:
    """Text from elsewhere without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def clean_line(text: str) -> str:
    """A line of a log without colours, tabs and whatever else a terminal would obey."""
    if text.isprintable():
        return text
    # Of a progress bar that was drawn over and over in one line, the last state.
    newest = text.rstrip("\r").rpartition("\r")[2]
    return plain_text(ESCAPES.sub("", newest).expandtabs()).rstrip()


def shown(path: Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def command_name() -> str:
    """The ``inflight`` command as one would type it here: by its name if that is found, else by its path."""
    used = Path(sys.argv[0])
    if used.name != "inflight" or shutil.which("inflight") == str(used.absolute()):
        return "inflight"
    return shown(used)
