"""Programs of Debian packages: those that are missing are installed, or the message says how."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from control_plane.cluster import ClusterError

INSTALL_DEADLINE_S = 540.0
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""What the PATH of somebody who has become root may lack."""


def ensure_programs(packages: Mapping[str, str]) -> None:
    """Install the packages of the programs that are missing (Debian, Ubuntu; as root); all can be run by name then.

    Args:
        packages: the package of each program; a program is a name, or a path if it is not on the PATH.

    Raises:
        ClusterError: some are missing and cannot be installed here; the message says what to do.
    """
    if SYSTEM_PATH not in os.environ.get("PATH", ""):
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"
    missing = sorted({package for program, package in packages.items() if not found(program)})
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install what the Debian packages {', '.join(missing)} hold, then try again")
    if os.geteuid() != 0:
        raise ClusterError(f"packages are missing; as root: {command}")
    sys.stderr.write(f"test cluster: {command}\n")
    if _install(missing) != 0:  # the lists of what there is are old, or were never fetched
        _apt("update")
        if (code := _install(missing)) != 0:
            raise ClusterError(f"{command} ended with {code}; its words are above")
    if still := sorted(program for program in packages if not found(program)):
        raise ClusterError(f"{command} has not brought {', '.join(still)}")


def found(program: str) -> bool:
    """Whether a program, by name or path, is there."""
    if "/" in program:
        return Path(program).exists()
    return shutil.which(program) is not None


def _install(packages: list[str]) -> int:
    return _apt("install", "--yes", "--no-install-recommends", *packages)


def _apt(*arguments: str) -> int:
    # Somebody else may be installing something just now.
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=INSTALL_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)} took longer than {INSTALL_DEADLINE_S:g} s") from error
    return done.returncode
