"""Checkpoints that are either whole or not there.

One directory a checkpoint, ``step-00000012``: ``model/`` (Hugging Face format, tokenizer included: usable as it is),
``trainer.pt`` and ``runtime.json``. It is written under a temporary name, every file and directory is fsynced, and it
is renamed into place; then ``LATEST`` moves. ``runtime.json`` lists size and SHA-256 of every other file, so that a
checkpoint that was cut off or damaged is recognised and passed over when a run resumes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inflight_runtime.trainer.manifest import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    DamagedError,
    cause,
    read_checkpoint,
    write_manifest,
)

logger = logging.getLogger(__name__)

LATEST: Final = "LATEST"
OWNER: Final = "OWNER"
PREFIX: Final = "step-"
TEMPORARY: Final = ".writing-"
REPLACED: Final = ".replaced-"
REMOVED: Final = ".removed-"
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
        self._epoch: int | None = None
        # Names of what is not finished are this trainer's alone: one that was superseded may still be writing.
        self._mark = os.urandom(4).hex()

    def claim(self, epoch: int) -> None:
        """Take the directory over: a trainer that was superseded, and may wake up late, writes nothing any more."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = self.directory / f"{TEMPORARY}{OWNER}-{self._mark}"
            temporary.write_text(f"{epoch}\n")
            _sync_file(temporary)
            temporary.replace(self.directory / OWNER)
            _sync_directory(self.directory)
        except OSError as error:
            logger.warning("%s: this trainer cannot say that it is its own now: %s", self.directory, error)
        else:
            self._epoch = epoch

    def save(self, step: int, write: Callable[[Path], None], tokenizer: Path | None) -> Checkpoint:
        """Write a checkpoint, move ``LATEST`` to it and remove those beyond ``keep``.

        Args:
            step: optimizer steps done.
            write: writes ``model/`` and ``trainer.pt`` into the directory it is given.
            tokenizer: directory whose tokenizer files are copied to ``model/``.

        Raises:
            CheckpointError: it could not be written; the ones before it are untouched.
        """
        target = step_path(self.directory, step)
        temporary, replaced = (self.directory / f"{name}{target.name}-{self._mark}" for name in (TEMPORARY, REPLACED))
        pointer = self.directory / f"{TEMPORARY}{LATEST}-{self._mark}"
        held = -1
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove(temporary)
            temporary.mkdir()
            held = os.open(temporary, os.O_RDONLY)  # while it is held no other directory can be taken for it
            write(temporary)
            if tokenizer is not None:
                _copy_tokenizer(tokenizer, temporary / "model")
            write_manifest(temporary, step, self.job)
            _sync_tree(temporary)
            # While nothing has moved yet: afterwards a disk that is full now would leave LATEST behind.
            pointer.write_text(target.name + "\n")
            _sync_file(pointer)
            self._check_owner(temporary, held)
            if os.path.lexists(target):  # a damaged one that resuming has passed over, or one of a lost timeline
                _remove(replaced)
                target.rename(replaced)
            temporary.rename(target)
            _sync_directory(self.directory)
        except Exception as error:  # safetensors and torch have their own errors for a full disk
            problem = f"{cause(error)} ({_free_space(self.directory)})"
            _remove(temporary)
            _remove(pointer)
            if os.path.lexists(replaced) and not os.path.lexists(target):
                replaced.rename(target)
            helps = "" if isinstance(error, CheckpointError) else " Free some space there or lower checkpoint.keep."
            kept = [other for other in self.whole_steps() if other != step]
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: {problem}. "
                + (f"The one of step {kept[-1]} is untouched." if kept else "There is none before it.")
                + helps
            ) from error
        finally:
            if held >= 0:
                os.close(held)
        self._broken.discard(step)
        try:
            pointer.replace(self.directory / LATEST)
            _sync_directory(self.directory)
        except OSError as error:  # nothing that resumes reads it
            logger.warning("%s names an older checkpoint than there is: %s", self.directory / LATEST, error)
        self._prune(step)
        return Checkpoint(target, step, self.job)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, whole or not, ascending.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        return steps_in(self.directory)

    def whole_steps(self) -> list[int]:
        """Steps of the checkpoints that a resume may take, ascending."""
        return [step for step in self.steps() if step not in self._broken]

    def newest_whole(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; each one passed over gets a line in the log. ``None``: there is none.

        Raises:
            CheckpointError: they are another job's, or none is whole, or somebody has to mend something first.
            OSError: the disk does not answer.
        """
        for name in _names(self.directory):
            if name.startswith((TEMPORARY, REPLACED, REMOVED)):
                _remove(self.directory / name)
        found, damage = newest_whole_in(self.directory)
        self._broken |= damage.keys()
        if found is None:
            if damage:
                raise CheckpointError(_none_whole(self.directory, damage))
            return None
        if found.job != self.job:
            raise CheckpointError(
                f"{found.path} is a checkpoint of job {found.job!r}, this is {self.job!r}: choose another checkpoint "
                "directory, or start from that checkpoint with resumeFrom"
            )
        return found

    def _check_owner(self, temporary: Path, held: int) -> None:
        """See that no other trainer has begun meanwhile, which may have removed what is being written.

        Raises:
            CheckpointError: one has.
        """
        if not (temporary.exists() and os.path.samestat(temporary.stat(), os.fstat(held))):
            raise CheckpointError("what was being written has been removed by a trainer that has started since")
        if self._epoch is not None and (owner := (self.directory / OWNER).read_text().strip()) != str(self._epoch):
            raise CheckpointError(f"the trainer of epoch {owner} has taken the directory over from epoch {self._epoch}")

    def _prune(self, newest: int) -> None:
        """Keep the newest whole ones up to ``newest``; later ones are of a timeline that was rolled back."""
        kept = [step for step in self.whole_steps() if step <= newest][-self.keep :]
        for step in self.steps():
            if step not in kept:
                _remove(step_path(self.directory, step))
        for name in _names(self.directory):
            if name.startswith((REPLACED, REMOVED)):
                _remove(self.directory / name)


def start_checkpoint(path: Path) -> Path:
    """The checkpoint that ``resume_from`` names: itself, or the newest whole one in it.

    Raises:
        CheckpointError: there is no whole checkpoint, or somebody has to mend something first.
        OSError: the disk does not answer.
    """
    if os.path.lexists(path / MANIFEST):
        return read_checkpoint(path).path
    found, damage = newest_whole_in(path)
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume_from {path}: "
            + (_none_whole(path, damage) if damage else "there is no checkpoint; check the path")
        )
    return found.path


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"{PREFIX}{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Steps of a directory's checkpoints, whole or not, ascending.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    numbers = (name.removeprefix(PREFIX) for name in _names(directory) if name.startswith(PREFIX))
    steps = (int(number) for number in numbers if number.isascii() and number.isdecimal())
    return sorted(step for step in steps if os.path.lexists(step_path(directory, step)))


def newest_whole_in(directory: Path) -> tuple[Checkpoint | None, dict[int, str]]:
    """The newest whole checkpoint of a directory, and what is wrong with each newer one; those are logged, too.

    Raises:
        CheckpointError: somebody has to mend something before a checkpoint can be chosen.
        OSError: the disk does not answer.
    """
    damage: dict[int, str] = {}
    for step in reversed(steps_in(directory)):
        try:
            found = read_checkpoint(step_path(directory, step))
        except DamagedError as error:
            logger.warning("checkpoint passed over: %s", error)
            damage[step] = str(error)
            continue
        if found.step != step:
            raise CheckpointError(f"{found.path} is the checkpoint of step {found.step}: give it its own name again")
        if damage:
            logger.warning(
                "going on from step %d; what was passed over will be removed when the next checkpoint is written", step
            )
        return found, damage
    return None, damage


def _none_whole(directory: Path, damage: dict[int, str]) -> str:
    return (
        f"none of the {len(damage)} checkpoints in {directory} is whole, and nothing is begun anew in their place: "
        + "; ".join(damage.values())
        + ". Put a whole one back, or start a new job in another directory; a model/ that is whole will do as its model"
    )


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return []
    except (PermissionError, NotADirectoryError) as error:
        raise CheckpointError(
            f"checkpoint directory {directory} cannot be read: {error.strerror}. Give this process the right to it, or "
            "choose another one"
        ) from error


def _remove(path: Path) -> None:
    """Remove whatever is there, as far as that is possible; a link alone, not what it points to.

    A directory goes from its place at once: nobody finds half of it there, were this process killed meanwhile.
    """
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path = path.rename(path.with_name(f"{REMOVED}{os.urandom(8).hex()}"))
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _free_space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 2**20:.1f} MiB are free there"
    except OSError as error:
        return f"its free space cannot be told: {error}"


def _copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


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
