"""The directory of one local run: everything it was told, says and leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

LAYOUT: Final = 1
"""Version of ``run.json``."""


class RunDirectoryError(Exception):
    """The run directory cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What ``run.json`` keeps, so that other commands find the run and ``--resume`` can go on with it.

    Attributes:
        job: the job's name.
        job_file: where the job file was; relative paths in it start from its directory.
        overrides: ``--set`` arguments, in order.
        coordinator_url: address of the coordinator while the run is alive.
        pid: process id of the executor.
        started: seconds since 1970.
        outcome: ``succeeded`` or ``failed`` once the run is over for good; empty while it may go on.
        reason: why it failed.
    """

    job: str
    job_file: str
    overrides: tuple[str, ...]
    coordinator_url: str = ""
    pid: int = 0
    started: float = 0.0
    outcome: str = ""
    reason: str = ""


class RunDirectory:
    """Paths of a run. Nothing is made before :meth:`create`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: IO[str] | None = None

    @property
    def job_file(self) -> Path:
        """The job as it was given."""
        return self.path / "job.yaml"

    @property
    def record_file(self) -> Path:
        """``run.json``."""
        return self.path / "run.json"

    @property
    def token_file(self) -> Path:
        """The run's bearer token, readable by its owner only."""
        return self.path / "token"

    @property
    def metrics(self) -> Path:
        """One JSON object for each step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One JSON object for each attempt that is written down."""
        return self.path / "rollouts.jsonl"

    @property
    def updates(self) -> Path:
        """One JSON object for each weight update of a server."""
        return self.path / "updates.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the trainer."""
        return self.path / "checkpoints"

    @property
    def config(self) -> Path:
        """Rendered role configs."""
        return self.path / "config"

    @property
    def logs(self) -> Path:
        """One log for each role."""
        return self.path / "logs"

    def log(self, role: str) -> Path:
        """The log file of a role."""
        return self.logs / f"{role}.log"

    def create(self, job_text: str, record: RunRecord) -> None:
        """Make the directory, its token and its records.

        Raises:
            RunDirectoryError: there is something in it already, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise RunDirectoryError(
                    f"--run-dir: {self.path} is not empty; name another directory, or go on with that run by "
                    f"inflight run --resume {self.path}"
                )
            for directory in (self.config, self.logs, self.checkpoints):
                directory.mkdir()
            self.job_file.write_text(job_text)
            with os.fdopen(os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                handle.write(secrets.token_urlsafe(32))
        except OSError as error:
            raise RunDirectoryError(f"--run-dir: {self.path} cannot be made: {error.strerror or error}") from error
        self.write_record(record)

    def write_record(self, record: RunRecord) -> None:
        """Replace ``run.json``."""
        temporary = self.record_file.with_suffix(".json.tmp")
        temporary.write_text(json.dumps({"layout": LAYOUT, **asdict(record)}, indent=1) + "\n")
        temporary.replace(self.record_file)

    def read_record(self) -> RunRecord:
        """Read ``run.json``.

        Raises:
            RunDirectoryError: this is no run directory, or one of another version.
        """
        try:
            raw = json.loads(self.record_file.read_text())
            if raw.pop("layout") != LAYOUT:
                raise RunDirectoryError(f"{self.path} was made by another version of Inflight; start a new run")
            return RunRecord(**{**raw, "overrides": tuple(raw["overrides"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunDirectoryError(
                f"{self.path} is no run directory (no readable run.json); give one that inflight run made, "
                "for instance runs/latest"
            ) from error

    def token(self) -> str:
        """Read the bearer token.

        Raises:
            RunDirectoryError: it is not there.
        """
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise RunDirectoryError(f"{self.token_file} cannot be read: {error.strerror or error}") from error

    def lock(self) -> None:
        """Hold the directory for this process, until it ends.

        Raises:
            RunDirectoryError: another executor runs in it.
        """
        handle = (self.path / ".lock").open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise RunDirectoryError(
                f"{self.path} belongs to a run that is still going on; wait for its end, or stop it with Ctrl-C"
            ) from error
        self._lock = handle

    def is_alive(self) -> bool:
        """Whether an executor holds the directory now."""
        with contextlib.suppress(OSError), (self.path / ".lock").open("r") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def new_run_path(base: Path, job: str) -> Path:
    """Get a path ``base/<job>-<time>`` that does not exist yet."""
    stem = f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (base / (stem if number == 0 else f"{stem}-{number + 1}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


def point_latest(path: Path) -> None:
    """Let ``latest`` beside a run directory point to it; a ``latest`` that is no link is left alone."""
    link = path.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    temporary = path.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    temporary.replace(link)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, without a last line that is still being written; empty when it is not there."""
    try:
        lines = path.read_text(errors="replace").split("\n")  # splitlines breaks lines inside of texts, too
    except OSError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
