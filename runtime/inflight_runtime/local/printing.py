"""``inflight logs`` of a local run: the log files of its processes side by side, as they are or as they grow."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError
from inflight_runtime.local.text import shown
from inflight_runtime.terminal import PrefixedLines

LOOK_EVERY_S: Final = 0.3
BLOCK: Final = 64 * 1024
READ_AT_ONCE: Final = 4 * 1024 * 1024
EXIT_NOTHING: Final = 1


class GrowingFile:
    """A log file that is read line by line while it is written.

    Args:
        path: the file.
        tail: lines to begin with; ``None`` for all.
    """

    def __init__(self, path: Path, tail: int | None) -> None:
        self.path = path
        self._offset = 0 if tail is None else _offset_of_last(path, tail)
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Get what is new, whole lines only; with ``last`` what is there of the last one as well."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""  # begun anew
                file.seek(self._offset)
                chunk = file.read(READ_AT_ONCE)
        except OSError:
            return []
        self._offset += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if last and self._rest and len(chunk) < READ_AT_ONCE:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode(errors="replace") for line in whole]


def show_logs(
    directory: RunDirectory,
    what: str,
    out: PrefixedLines,
    *,
    tail: int | None,
    follow: bool,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Write the logs; the exit code.

    Args:
        directory: of the run.
        what: a role or one of its processes (``inference-0``); empty for all.
        out: where the lines go.
        tail: lines of each log to begin with; ``None`` for all.
        follow: go on until the run is over.
        wait: how time passes.

    Raises:
        RunDirectoryError: it is no run directory, or there is no such process.
    """
    directory.read_record()
    found = log_files(directory, what)
    if not found and what:
        names = ", ".join(log_files(directory, "")) or "none yet"
        raise RunDirectoryError(f"{shown(directory.path)} has no log of {what}; there are {names}")
    files = {name: GrowingFile(path, tail) for name, path in found.items()}
    while True:
        alive = follow and directory.is_alive()
        while _write_new(files, out, last=not alive):
            pass
        out.flush()
        if not alive:
            return 0 if files else EXIT_NOTHING
        wait(LOOK_EVERY_S)
        for name, path in log_files(directory, what).items():
            if name not in files:
                files[name] = GrowingFile(path, None)


def log_files(directory: RunDirectory, what: str) -> dict[str, Path]:
    """The logs of a role or of one process, or with an empty ``what`` of all, by process."""
    found = {path.stem: path for path in sorted(directory.logs.glob("*.log"))}
    return {name: path for name, path in found.items() if what in ("", name, name.rpartition("-")[0])}


def _write_new(files: dict[str, GrowingFile], out: PrefixedLines, *, last: bool) -> bool:
    some = False
    for name, file in files.items():
        for line in file.lines(last=last):
            out.line(name, line)
            some = True
    return some


def _offset_of_last(path: Path, lines: int) -> int:
    """Where the last so many lines of a file begin."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        begin = end = file.seek(0, os.SEEK_END)
        if not lines:
            return end
        newlines = 0
        while begin > 0:
            size = min(BLOCK, begin)
            begin -= size
            file.seek(begin)
            block = file.read(size)
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                if begin + at + 1 == end:
                    continue  # the last line's own
                newlines += 1
                if newlines == lines:
                    return begin + at + 1
    return 0
