"""Checkpoints that are either whole or not there.

One directory a checkpoint, ``step-00000012``: ``model/`` (Hugging Face format, tokenizer included: usable as it is),
``trainer.pt`` and ``runtime.json``. It is written under a temporary name, every file and directory is fsynced, and it
is renamed into place; then ``LATEST`` moves. ``runtime.json`` lists size and SHA-256 of every other file, so that a
checkpoint that was cut off or damaged is recognised and passed over when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Layout of a checkpoint directory."""
MANIFEST: Final = "runtime.json"
LATEST: Final = "LATEST"
PREFIX: Final = "step-"
TEMPORARY: Final = ".writing-"
REPLACED: Final = ".replaced-"
_CHUNK: Final = 1 << 20
_TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "*.py",
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message names the place, the reason and what helps."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    job: str


class CheckpointStore:
    """The checkpoints of one run, in one directory that no other run writes to."""

    def __init__(self, directory: Path, job: str, keep: int) -> None:
        """Make a store; nothing is read or written yet.

        Args:
            directory: where checkpoints lie.
            job: name of the job; the checkpoints of another one are refused.
            keep: how many are kept, at least 1.
        """
        self.directory = directory
        self.job = job
        self.keep = max(1, keep)
        self._broken: set[int] = set()

    def save(self, step: int, write: Callable[[Path], None], tokenizer: Path | None) -> Checkpoint:
        """Write a checkpoint, move ``LATEST`` to it and remove those beyond ``keep``.

        Args:
            step: optimizer steps done.
            write: writes ``model/`` and ``trainer.pt`` into the directory it is given.
            tokenizer: directory whose tokenizer files are copied to ``model/``.

        Raises:
            CheckpointError: it could not be written; the ones before it are untouched.
        """
        name = f"{PREFIX}{step:08d}"
        target, temporary = self.directory / name, self.directory / f"{TEMPORARY}{name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write(temporary)
            if tokenizer is not None:
                _copy_tokenizer(tokenizer, temporary / "model")
            _write_manifest(temporary, step, self.job)
            _sync_tree(temporary)
            if target.exists():  # a damaged one that resuming has passed over, or one of a timeline rolled back
                replaced = self.directory / f"{REPLACED}{name}"
                shutil.rmtree(replaced, ignore_errors=True)
                target.rename(replaced)
            temporary.rename(target)
            _sync_directory(self.directory)
            self._point_latest(name)
        except Exception as error:  # safetensors has its own errors for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.steps()
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: {error}. "
                + (f"The one of step {kept[-1]} is untouched." if kept else "There is none before it.")
                + " Free some space there or lower checkpoint.keep."
            ) from error
        self._broken.discard(step)
        self._prune(step)
        return Checkpoint(target, step, self.job)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, whole or not, ascending."""
        if not self.directory.is_dir():
            return []
        names = (path.name.removeprefix(PREFIX) for path in self.directory.glob(f"{PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def whole_steps(self) -> list[int]:
        """Steps of the checkpoints that a resume may take, ascending."""
        return [step for step in self.steps() if step not in self._broken]

    def newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; each one passed over gets a line in the log.

        Raises:
            CheckpointError: the checkpoints here are another job's.
        """
        for leftover in (*self.directory.glob(f"{TEMPORARY}*"), *self.directory.glob(f"{REPLACED}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        for step in reversed(self.steps()):
            path = self.directory / f"{PREFIX}{step:08d}"
            try:
                found = read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("checkpoint passed over: %s", error)
                self._broken.add(step)
                continue
            if found.job != self.job:
                raise CheckpointError(
                    f"{path} is a checkpoint of job {found.job!r}, this is {self.job!r}: choose another checkpoint "
                    "directory, or start from that checkpoint with resumeFrom"
                )
            return found
        return None

    def _point_latest(self, name: str) -> None:
        temporary = self.directory / f"{TEMPORARY}{LATEST}"
        temporary.write_text(name + "\n")
        _sync_file(temporary)
        temporary.replace(self.directory / LATEST)
        _sync_directory(self.directory)

    def _prune(self, newest: int) -> None:
        """Keep the newest whole ones up to ``newest``; later ones are of a timeline that was rolled back."""
        steps = self.steps()
        kept = [step for step in self.whole_steps() if step <= newest][-self.keep :]
        for step in steps:
            if step not in kept:
                shutil.rmtree(self.directory / f"{PREFIX}{step:08d}", ignore_errors=True)
        for replaced in self.directory.glob(f"{REPLACED}*"):
            shutil.rmtree(replaced, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check that a checkpoint is whole: every file there, with the size and the SHA-256 that were written.

    Raises:
        CheckpointError: it is not, with the first thing that is wrong.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written, files = manifest["format"], dict(manifest["files"])
        step, job = int(manifest["step"]), str(manifest["job"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no {MANIFEST}, so this is no whole checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read: {error}") from error
    if written != FORMAT:
        raise CheckpointError(f"{path}: has format {written}, this version reads format {FORMAT}")
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{path}: {name} has {size} bytes of {entry['bytes']}; it was cut off or changed")
            if _sha256(path / name) != entry["sha256"]:
                raise CheckpointError(f"{path}: {name} is damaged (its SHA-256 is another one)")
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
    return Checkpoint(path, step, job)


def _write_manifest(directory: Path, step: int, job: str) -> None:
    files: dict[str, dict[str, Any]] = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    body = {"format": FORMAT, "job": job, "step": step, "files": files}
    (directory / MANIFEST).write_text(json.dumps(body, indent=1) + "\n")


def _copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_dir():
            _sync_directory(path)
        else:
            _sync_file(path)
    _sync_directory(directory)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_directory = _sync_file
"""A directory is fsynced like a file: its entries are then on disk."""
