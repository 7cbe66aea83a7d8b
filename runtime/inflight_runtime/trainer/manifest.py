"""What says that a checkpoint is whole: ``runtime.json``, the list of its files with size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT: Final = 1
"""Layout of a checkpoint directory."""
MANIFEST: Final = "runtime.json"
_CHUNK: Final = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message names the place, the reason and what helps."""


class DamagedError(CheckpointError):
    """A checkpoint is not whole, for good: an older one must do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    job: str


def cause(error: BaseException) -> str:
    """What the system said, if it said something: libraries wrap it into lines of C++."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return str(link)
        link = link.__cause__ or link.__context__
    return str(error).partition("\n")[0] or repr(error)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check that a checkpoint is whole: every file there, with the size and the SHA-256 that were written.

    Raises:
        DamagedError: it is not, with the first thing that is wrong.
        CheckpointError: it may be whole and cannot be used as it lies there; somebody has to mend that.
        OSError: the disk does not answer.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link: put the directory that it points to in its place")
    body = _reading(path, MANIFEST, (path / MANIFEST).read_text)
    try:
        manifest = json.loads(body)
        written, files = manifest["format"], dict(manifest["files"])
        step, job = int(manifest["step"]), str(manifest["job"])
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DamagedError(f"{path}: {MANIFEST} cannot be understood, it was cut off or changed: {error}") from error
    if written != FORMAT:
        raise CheckpointError(
            f"{path}: has format {written}, this version reads format {FORMAT}: go on with the version that wrote it"
        )
    found = _reading(path, "the directory", lambda: _entries(path))
    for name, (size, _) in sorted(expected.items()):
        _check_kind(path, name, found.get(name))
        if found[name].st_size != size:
            raise DamagedError(f"{path}: {name} has {found[name].st_size} bytes of {size}; it was cut off or changed")
    for name, (_, digest) in sorted(expected.items()):
        if _reading(path, name, partial(_sha256, path / name)) != digest:
            raise DamagedError(f"{path}: {name} is damaged (its SHA-256 is another one)")
    _check_added(path, found.keys() - expected.keys() - {MANIFEST}, found)
    return Checkpoint(path, step, job)


def write_manifest(directory: Path, step: int, job: str) -> None:
    """Write ``runtime.json`` of the files that are there. It ends with its last brace: cut off, it is no JSON.

    Raises:
        OSError: it could not be written.
    """
    files: dict[str, dict[str, Any]] = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    body = {"format": FORMAT, "job": job, "step": step, "files": files}
    (directory / MANIFEST).write_text(json.dumps(body, indent=1))


def _check_kind(path: Path, name: str, status: os.stat_result | None) -> None:
    if status is None:
        raise DamagedError(f"{path}: {name} is missing")
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(f"{path}: {name} is a symbolic link: put the file that it points to in its place")
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{path}: {name} is not a file any more")


def _check_added(path: Path, names: set[str], found: dict[str, os.stat_result]) -> None:
    """What this run did not write must not be loaded; elsewhere it does no harm."""
    added = sorted(name for name in names if not stat.S_ISDIR(found[name].st_mode) and "/." not in f"/{name}")
    if loaded := [name for name in added if name.startswith("model/")]:
        raise CheckpointError(
            f"{path}: {', '.join(loaded)} was added after the checkpoint was written, and would be loaded with the "
            "model: move it elsewhere"
        )
    if added:
        logger.warning("%s: %s is not part of the checkpoint and is not looked at", path, ", ".join(added))


def _entries(directory: Path) -> dict[str, os.stat_result]:
    """Everything below a directory by its path in it; links are not followed."""
    found: dict[str, os.stat_result] = {}

    def refuse(error: OSError) -> NoReturn:
        raise error

    for parent, directories, files in os.walk(directory, onerror=refuse):
        for name in (*directories, *files):
            entry = Path(parent, name)
            found[entry.relative_to(directory).as_posix()] = entry.lstat()
    return found


def _reading(path: Path, name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path}: {name} is damaged: {error}") from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedError(f"{path}: there is no {name}, so this is no whole checkpoint") from error
    except PermissionError as error:
        raise CheckpointError(f"{path}: {name} may not be read by this process: give it the right to") from error
    except OSError as error:
        raise OSError(error.errno, f"{path}: {name} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
