"""A job's status as a picture of a few lines, as one line, and as a row of a table; laid out as a local run's."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inflight_runtime.api.status import Condition, RoleStatus
from inflight_runtime.cluster.jobs import Job
from inflight_runtime.local.text import clock_text, plain_text
from inflight_runtime.terminal import progress_bar

PHASE_STYLES: Final = {
    "Pending": "yellow",
    "Starting": "yellow",
    "Running": "cyan",
    "Suspending": "yellow",
    "Suspended": "yellow",
    "Completing": "cyan",
    "Succeeded": "green",
    "Failed": "red",
}
COLUMNS: Final = ("NAME", "PHASE", "STEP", "REWARD", "INFERENCE", "ACTORS", "TRAINER", "RESTARTS", "AGE", "REASON")


def picture(job: Job, place: str, now: datetime.datetime, steps_per_s: float | None = None) -> RenderableType:
    """One moment of a job.

    Args:
        job: the job.
        place: where it is, in words.
        now: the time.
        steps_per_s: optimizer steps per second, as far as that is known.
    """
    rows: list[RenderableType] = [_headline(job, now)]
    if job.status.progress is not None:
        rows.append(progress_bar(job.step, job.steps, _left_s(job, steps_per_s)))
        line = Text("  ")
        for name, value in numbers(job, steps_per_s):
            line.append(f"{name} ", style="dim").append(value, style="bold").append("   ")
        if len(line.plain) > 2:
            rows.append(line)
        rows += _groups(job)
    if job.status.starts:
        rows.append(_roles(job))
    for condition in job.troubles:
        rows.append(_trouble(condition))
    if job.hopeless:
        rows.append(Text("  no waiting helps: somebody has to change the job", style="red"))
    if job.status.phase is None:
        rows.append(Text("  no operator has looked at it yet", style="yellow"))
    rows.append(Text(plain_text(f"  {place}"), style="dim"))
    return Group(*rows)


def plain_line(job: Job, steps_per_s: float | None = None) -> str:
    """One moment of a job in one line."""
    parts = [job.phase]
    if job.status.progress is not None:
        parts.append(f"step {job.step}/{job.steps}")
        parts += [f"{name} {value}" for name, value in numbers(job, steps_per_s)]
    if job.status.starts and not job.over:
        servers = job.status.inference
        parts.append(f"servers {servers.ready}/{servers.desired}")
    left = _left_s(job, steps_per_s)
    if left is not None:
        parts.append(f"about {clock_text(left)} left")
    if job.status.restarts:
        parts.append(f"restarts {job.status.restarts}")
    parts += [_words(condition) for condition in job.troubles]
    return "  ".join(parts)


def numbers(job: Job, steps_per_s: float | None = None) -> list[tuple[str, str]]:
    """The numbers of the newest step that people look at, named and written out."""
    progress = job.status.progress
    if progress is None:
        return []
    found: list[tuple[str, str]] = []
    if progress.reward_mean is not None:
        found.append(("reward", f"{progress.reward_mean:.3f}"))
    if progress.staleness_mean is not None:
        found.append(("staleness", f"{progress.staleness_mean:.2f}"))
    if steps_per_s is not None:
        found.append(("steps/s", f"{steps_per_s:.2f}"))
    if progress.tokens_per_second is not None:
        found.append(("tokens/s", f"{progress.tokens_per_second:,.0f}"))
    if progress.policy_version is not None:
        found.append(("version", f"{progress.policy_version.epoch}.{progress.policy_version.step}"))
    return found


def table(jobs: Sequence[Job], now: datetime.datetime, *, namespaces: bool = False) -> Table:
    """All jobs of a namespace, or of all of them."""
    shown = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="")
    for column in (["NAMESPACE"] if namespaces else []) + list(COLUMNS):
        shown.add_column(column, no_wrap=True, overflow="ellipsis" if column == "REASON" else "fold")
    for job in jobs:
        cells: list[str | Text] = [plain_text(job.namespace)] if namespaces else []
        name, phase, *rest = row(job, now)
        cells += [name, Text(phase, style=PHASE_STYLES.get(phase, "")), *rest]
        shown.add_row(*cells)
    return shown


def row(job: Job, now: datetime.datetime) -> list[str]:
    """A job's cells under :data:`COLUMNS`."""
    progress, status = job.status.progress, job.status
    reward = progress.reward_mean if progress else None
    ready = job.condition("Ready")
    return [
        job.name,
        job.phase,
        f"{job.step}/{job.steps}" if progress else "",
        "" if reward is None else f"{reward:.3f}",
        *(f"{role.ready}/{role.desired}" for role in (status.inference, status.actors, status.trainer)),
        str(status.restarts),
        age_text((now - job.created).total_seconds()) if job.created else "",
        ready.reason if ready is not None and ready.reason != status.phase else "",
    ]


def age_text(seconds: float) -> str:
    """``75`` as ``75s``, ``3700`` as ``61m``, ``90000`` as ``25h``: as kubectl does, roughly."""
    whole = max(0, int(seconds))
    for unit, size, until in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if whole < size * until:
            return f"{whole // size}{unit}"
    return f"{whole // 86400}d"


def _headline(job: Job, now: datetime.datetime) -> Text:
    line = Text.assemble((job.name, "bold"), "  ", (job.phase, PHASE_STYLES.get(job.phase, "")))
    line.append(f"  {clock_text(job.active_s(now))}")
    if job.suspend and job.status.phase != "Suspended" and not job.over:
        line.append("  to be suspended", style="yellow")
    if job.status.gpus:
        line.append(f"  {job.status.gpus} GPUs")
    return line


def _groups(job: Job) -> list[Text]:
    progress = job.status.progress
    if progress is None or progress.groups_trained is None:
        return []
    line = Text("  ", style="dim").append(f"groups {progress.groups_trained} trained")
    if progress.groups_dropped:
        line.append(f"   dropped {progress.groups_dropped}", style="yellow")
    if progress.checkpoint_step is not None:
        line.append(f"   checkpoint of step {progress.checkpoint_step}")
    return [line]


def _roles(job: Job) -> Table:
    status = job.status
    roles: tuple[tuple[str, RoleStatus], ...] = (
        ("coordinator", status.coordinator),
        ("inference", status.inference),
        ("actor", status.actors),
        ("trainer", status.trainer),
    )
    shown = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=True)
    for column in ("role", "ready", "restarts", "image"):
        shown.add_column(column, no_wrap=True, overflow="ellipsis")
    for name, count in roles:
        style = "green" if count.ready >= count.desired > 0 else "yellow" if count.desired else "dim"
        # Only the trainer's are counted: a server or an actor that comes back is no news.
        restarts = str(status.restarts) if name == "trainer" else ""
        ready = Text(f"{count.ready}/{count.desired}", style=style)
        shown.add_row(name, ready, restarts, plain_text(status.images.get(name, "")))
    return shown


def _trouble(condition: Condition) -> Text:
    return Text(f"  {_words(condition)}", style="red" if condition.type == "Failed" else "yellow")


def _words(condition: Condition) -> str:
    message = " ".join(condition.message.split())
    return plain_text(f"{condition.type}: {condition.reason}{f': {message}' if message else ''}")


def _left_s(job: Job, steps_per_s: float | None) -> float | None:
    if not steps_per_s or job.step >= job.steps or job.status.phase != "Running":
        return None
    return (job.steps - job.step) / steps_per_s
