"""Where rollout payloads lie: a small store interface and append-only segment files.

A record is ``length (u32 LE) · crc32 (u32 LE) · bytes``; the ledger names it by segment, offset and length. A payload
is fsynced before the transaction that names it. A process never appends to a file that an earlier process wrote, so a
torn tail is simply never referred to.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple, Protocol

_HEADER: Final = struct.Struct("<II")
_NAME: Final = re.compile(r"(\d{8})\.seg")
SEGMENT_BYTES: Final = 32 * 1024 * 1024


class PayloadRef(NamedTuple):
    """Where a payload lies; ``length`` counts the payload alone."""

    segment: int
    offset: int
    length: int


class PayloadError(Exception):
    """A payload is missing or damaged; the message names the file and the place."""


class PayloadStore(Protocol):
    """What the ledger needs of a payload store. Used by one writing thread; ``read`` may come from any thread."""

    def append(self, data: bytes) -> PayloadRef:
        """Write a payload; durable only after the next :meth:`sync`."""

    def sync(self) -> None:
        """Make everything appended so far durable."""

    def read(self, ref: PayloadRef) -> bytes:
        """Read a payload back.

        Raises:
            PayloadError: it is missing or damaged.
        """

    def closed_segments(self) -> list[int]:
        """Units that nothing is appended to any more, oldest first."""

    def delete(self, segments: Collection[int]) -> None:
        """Remove whole segments; those that are gone already are skipped."""

    def close(self) -> None:
        """Flush and let go of everything."""


class SegmentStore:
    """Payloads in append-only files ``<directory>/00000001.seg``, each at most about ``segment_bytes`` long."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the store, making the directory if need be.

        Raises:
            OSError: the directory cannot be made or read.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._present = sorted(int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))
        self._current: int | None = None
        self._next = self._present[-1] + 1 if self._present else 1
        self._file = -1
        self._size = 0
        self._dirty = False

    def append(self, data: bytes) -> PayloadRef:
        """Write a payload; durable only after the next :meth:`sync`."""
        if self._current is None or self._size >= self._segment_bytes:
            self._roll()
        assert self._current is not None
        record = _HEADER.pack(len(data), zlib.crc32(data)) + data
        written = 0
        while written < len(record):
            written += os.pwrite(self._file, memoryview(record)[written:], self._size + written)
        ref = PayloadRef(self._current, self._size, len(data))
        self._size += len(record)
        self._dirty = True
        return ref

    def sync(self) -> None:
        """Make everything appended so far durable.

        Raises:
            OSError: it may not be; what was appended since the last sync must not be referred to.
        """
        if not self._dirty:
            return
        self._dirty = False
        try:
            os.fdatasync(self._file)
        except OSError:
            # After a failed fsync the kernel may call lost pages clean: never write to this file again.
            os.close(self._file)
            self._file, self._current = -1, None
            raise

    def read(self, ref: PayloadRef) -> bytes:
        """Read a payload back and check it.

        Raises:
            PayloadError: it is missing or damaged.
        """
        path = self._path(ref.segment)
        try:
            with path.open("rb") as file:
                record = os.pread(file.fileno(), _HEADER.size + ref.length, ref.offset)
        except OSError as error:
            raise PayloadError(f"payload file {path} cannot be read: {error}") from error
        length, checksum = _HEADER.unpack_from(record) if len(record) >= _HEADER.size else (-1, 0)
        data = record[_HEADER.size :]
        if length != ref.length or len(data) != ref.length or zlib.crc32(data) != checksum:
            raise PayloadError(f"payload file {path} is damaged at offset {ref.offset} ({ref.length} bytes expected)")
        return data

    def closed_segments(self) -> list[int]:
        """Segments that nothing is appended to any more, oldest first."""
        return [segment for segment in self._present if segment != self._current]

    def delete(self, segments: Collection[int]) -> None:
        """Remove whole segments; those that are gone already are skipped."""
        for segment in segments:
            if segment == self._current:
                raise ValueError(f"segment {segment} is being written")
            self._path(segment).unlink(missing_ok=True)
        self._present = [segment for segment in self._present if segment not in segments]

    def check(self, ends: dict[int, int]) -> None:
        """Check that what a ledger names is there, and remove what it does not name.

        Args:
            ends: segment -> largest ``offset + length`` of the payloads in use.

        Raises:
            PayloadError: a file is missing or too short.
        """
        for segment, end in ends.items():
            path = self._path(segment)
            size = path.stat().st_size if path.exists() else -1
            if size < end + _HEADER.size:
                what = "is missing" if size < 0 else f"has {size} bytes, {end + _HEADER.size} are expected"
                raise PayloadError(f"payload file {path} {what}: the data directory is damaged or only partly copied")
        self.delete([segment for segment in self.closed_segments() if segment not in ends])

    def close(self) -> None:
        """Flush and close the file that is written."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
            self._current = None

    def _roll(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
        segment = self._next
        self._next += 1
        self._file = os.open(self._path(segment), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # else the file's name may be lost with the power
        finally:
            os.close(directory)
        self._present.append(segment)
        self._current, self._size = segment, 0

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.seg"
