"""Buildah with a store of its own in the cache directory: layers outlive sessions and serve all clones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from control_plane.cluster import ClusterError
from control_plane.cluster.binaries import cache_directory

from ..packages import ensure_programs

PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap", "skopeo": "skopeo"}
CALL_DEADLINE_S = 300.0
IN_USE = re.compile(r"in-use-by-(\d+)-")


def directory() -> Path:
    """Where images, and everything they are made from, are kept."""
    return cache_directory() / "images"


def ensure_tools() -> None:
    """Have buildah and debootstrap.

    Raises:
        ClusterError: they are missing and cannot be installed, or this is not root.
    """
    if os.geteuid() != 0:
        raise ClusterError("images are built as root here (debootstrap and the layers' owners need it): use sudo")
    ensure_programs(PROGRAMS)


def buildah(*arguments: str | Path, deadline_s: float = CALL_DEADLINE_S, shown: bool = False) -> str:
    """Run buildah on the project's store and return what it prints.

    Args:
        arguments: of buildah.
        deadline_s: seconds that it may take.
        shown: whether what it prints goes to standard error as it comes, and only there.

    Raises:
        ClusterError: it failed, with its last words, or took too long.
    """
    base = directory()
    command = [
        "buildah",
        *("--root", str(base / "storage"), "--runroot", str(base / "run"), "--storage-driver", "overlay"),
        *map(str, arguments),
    ]
    return run(command, deadline_s=deadline_s, shown=shown)


def run(
    command: list[str], *, deadline_s: float, shown: bool = False, environment: dict[str, str] | None = None
) -> str:
    """Run a command in a process group of its own, which ends with it, at the deadline, or when we are interrupted.

    Raises:
        ClusterError: it failed, with its last words, or took too long.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        env=os.environ | (environment or {}),
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)} took longer than {deadline_s:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        told = "its words are above" if shown else printed[-4000:]
        raise ClusterError(f"{' '.join(command)} ended with {process.returncode}:\n{told}")
    return printed or ""


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keeps builds of several sessions apart, and clears away what an interrupted one has left."""
    directory().mkdir(parents=True, exist_ok=True)
    with (directory() / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("somebody else is building images; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        if left := _left_behind():
            buildah("rm", *left)
        yield


def container_name() -> str:
    """A name for a container of this process, which others leave alone while it lives."""
    return f"in-use-by-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _left_behind() -> list[str]:
    """Containers of builds, which can only be interrupted ones, and of processes that are gone."""
    names = buildah("containers", "--format", "{{.ContainerName}}").split()
    return [name for name in names if not (owner := IN_USE.match(name)) or not _lives(owner[1])]


def _lives(process: str) -> bool:
    return Path("/proc", process).exists()


def say(text: str) -> None:
    """Tell whoever waits."""
    sys.stderr.write(f"images: {text}\n")
    sys.stderr.flush()
