"""Append-only files of a run's logs. A full disk costs lines, never the run, and never leaves half of an entry."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

logger = logging.getLogger(__name__)

LINE_BREAKS: Final = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""What breaks a line for Unicode, and so for ``str.splitlines`` and many editors; JSON escapes the others itself."""


class AppendedFile:
    """A file to which whole entries are added, unbuffered."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            OSError: it cannot be written to.
        """
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._failed = 0

    def add(self, data: bytes) -> None:
        """Add an entry; when there is no room, none of it, and a line in the log for the first of several failures."""
        if self._file.closed:
            return
        end = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._failed += 1
            if self._failed == 1:
                logger.error("%s: an entry could not be written and is left out: %s", self._path, error)
            if os.fstat(self._file.fileno()).st_size > end:
                os.truncate(self._file.fileno(), end)
            return
        if self._failed:
            logger.warning("%s: %d entries were left out; it is being written again", self._path, self._failed)
            self._failed = 0

    def close(self) -> None:
        """Close the file; what is added later is left out."""
        self._file.close()


class LineFile(AppendedFile):
    """JSON, one object a line."""

    def write(self, *entries: Mapping[str, Any]) -> None:
        """Add entries, all of them or none."""
        self.add("".join(map(json_line, entries)).encode())


class Board(AppendedFile):
    """A TensorBoard event file.

    tensorboardX's own writer has a thread that a full disk ends, and then its queue fills and stops the training.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        """Begin a file.

        Args:
            directory: made if it is not there.
            first_step: what there is from this step on belongs to a lost timeline and is not shown.

        Raises:
            OSError: it cannot be written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        super().__init__(directory / f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}")
        self._event(Event(wall_time=now, file_version="brain.Event:2"))
        if first_step > 1:
            self._event(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step that are finite."""
        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if math.isfinite(value)]
        self._event(Event(wall_time=time.time(), step=step, summary=Summary(value=shown)))

    def _event(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self.add(length + _checksum(length) + data + _checksum(data))


def json_line(entry: Mapping[str, Any]) -> str:
    """JSON on one line, by whatever rule lines are told apart."""
    return json.dumps(_plain(entry), ensure_ascii=False).translate(LINE_BREAKS) + "\n"


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()
    }
