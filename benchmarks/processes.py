"""CPU time and memory of a run's roles, read from ``/proc``.

A role is a process group of its own: the one that the executor started with the role's config.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """What is needed of ``/proc/PID/stat``."""

    pid: int
    parent: int
    group: int
    cpu_s: float


def parse_stat(text: str) -> ProcessLine:
    """Read ``/proc/PID/stat``; its CPU time includes children that were waited for.

    Raises:
        ValueError, IndexError: it is no such line.
    """
    # The command stands in parentheses and may hold anything, so the fields are counted from the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    ticks = sum(int(fields[index]) for index in (11, 12, 13, 14))
    return ProcessLine(int(head.split(" ", 1)[0]), int(fields[1]), int(fields[2]), ticks * TICK_S)


def parse_pss(text: str) -> int:
    """Bytes of proportional set size in a ``smaps_rollup``.

    Raises:
        ValueError: there is no such line.
    """
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * PAGE_KIB
    raise ValueError("smaps_rollup has no line 'Pss:'")


def parse_busy(text: str) -> float:
    """Seconds that all cores together have worked, from ``/proc/stat``: everything but idle, waiting and stolen."""
    user, nice, system, _idle, _iowait, irq, softirq = (int(word) for word in text.split()[1:8])
    return (user + nice + system + irq + softirq) * TICK_S


def process_lines() -> list[ProcessLine]:
    """All processes of the machine."""
    lines = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                lines.append(parse_stat((entry / "stat").read_text()))
    return lines


@dataclass(slots=True)
class Roles:
    """The roles of one run: ``coordinator``, ``inference-0``, ..., ``actor-0``, ``trainer`` and ``executor``.

    Attributes:
        groups: process group by role.
        peak_pss: bytes, the most seen so far of each role.
    """

    groups: dict[str, int]
    peak_pss: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, executor: int, run_directory: Path) -> Roles:
        """Find the processes that an executor has started with the configs of its run directory."""
        names = {str(path): path.stem for path in (run_directory / "config").glob("*.json")}
        groups = {"executor": executor}
        for line in process_lines():
            if line.parent != executor or line.group != line.pid:
                continue
            # A server has become another program since: its environment still names the config.
            words = _words(line.pid, "cmdline") + [word.partition("=")[2] for word in _words(line.pid, "environ")]
            for word in words:
                if word in names:
                    groups[names[word]] = line.pid
        return cls(groups)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each role until now."""
        spent = dict.fromkeys(self.groups, 0.0)
        names = {group: name for name, group in self.groups.items()}
        for line in process_lines():
            if line.group in names:
                spent[names[line.group]] += line.cpu_s
        return spent

    def sample_memory(self) -> None:
        """Look at the proportional set size of each role; costs some milliseconds of CPU for each large process."""
        names = {group: name for name, group in self.groups.items()}
        now = dict.fromkeys(self.groups, 0)
        for line in process_lines():
            if line.group in names:
                with contextlib.suppress(OSError, ValueError):
                    now[names[line.group]] += parse_pss((PROC / str(line.pid) / "smaps_rollup").read_text())
        for name, size in now.items():
            self.peak_pss[name] = max(size, self.peak_pss.get(name, 0))


def busy_seconds() -> float:
    """CPU time of the whole machine until now."""
    with (PROC / "stat").open() as file:
        return parse_busy(file.readline())


def _words(pid: int, file: str) -> list[str]:
    try:
        return (PROC / str(pid) / file).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
