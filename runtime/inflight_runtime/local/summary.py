"""What is said when a run is over: how it went, where everything is, what to type next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from inflight_runtime.local.result import RunResult
from inflight_runtime.local.rundir import RunDirectory, read_json_lines
from inflight_runtime.local.text import clock_text, command_name, plain_text, shown

WINDOW: Final = 10
STYLES: Final = {"succeeded": "bold green", "failed": "bold red", "interrupted": "bold yellow"}


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric at the beginning and at the end: means over up to :data:`WINDOW` steps, a half of them at most."""

    first: float
    last: float


def trend(metrics: Sequence[dict[str, Any]], name: str) -> Trend | None:
    """Get the course of a metric; ``None`` when no step has it."""
    values = _values(metrics, name)
    if not values:
        return None
    window = min(WINDOW, max(1, len(values) // 2))
    return Trend(statistics.fmean(values[:window]), statistics.fmean(values[-window:]))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Get the smallest value that at least ``share`` of all do not exceed (nearest rank); ``None`` without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def surviving(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Get one record per step, in order; of a step that was trained again after a crash the later one counts."""
    by_step = {int(record["step"]): record for record in metrics if isinstance(record.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """Get the checkpoint that ``LATEST`` names."""
    try:
        name = (directory.checkpoints / "LATEST").read_text().strip()
    except OSError:
        return None
    path = directory.checkpoints / name
    return path if name and path.is_dir() else None


def render_summary(result: RunResult, directory: RunDirectory) -> RenderableType:
    """Lay the closing summary out."""
    metrics = surviving(read_json_lines(directory.metrics))
    rows: list[tuple[str, str]] = []
    state = result.state
    if state is not None:
        rate = f", {state.step / result.seconds:.2f} steps/s start-up included" if state.step else ""
        rows.append(("steps", f"{state.step} of {state.steps} in {clock_text(result.seconds)}{rate}"))
    course = trend(metrics, "reward_mean")
    if course is not None:
        rows.append(("reward", f"{course.first:.3f} over the first steps, {course.last:.3f} over the last"))
    names = sorted({name for record in metrics[-1:] for name in record if name.startswith("reward/")})
    for name in names:
        part = trend(metrics, name)
        if part is not None:
            rows.append((f"  {name.removeprefix('reward/')}", f"{part.first:.3f}, {part.last:.3f}"))
    updates = _values([entry for entry in read_json_lines(directory.updates) if entry.get("ok")], "update_ms")
    p50, p95 = percentile(updates, 0.5), percentile(updates, 0.95)
    if p50 is not None and p95 is not None:
        rows.append(("weight update", f"{p50:.0f} ms (median), {p95:.0f} ms (95th percentile)"))
    if state is not None and sum(state.dropped.values()) + state.attempts_failed:
        dropped = ", ".join(f"{count} {reason}" for reason, count in state.dropped.items()) or "none"
        rows.append(("groups dropped", f"{dropped}; {state.attempts_failed} attempts failed"))
    if result.restarts:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in result.restarts.items())))
    checkpoint = newest_checkpoint(directory)
    rows.append(("checkpoint", shown(checkpoint) if checkpoint else "none"))
    rows.append(("rollouts", shown(directory.rollouts)))
    rows.append(("logs", shown(directory.logs)))

    # Plain lines, not a table: a path that is wrapped or cut cannot be copied.
    width = max(len(name) for name, _ in rows) + 2
    lines = [Text.assemble((plain_text(f"  {name:<{width}}"), "dim"), plain_text(value)) for name, value in rows]
    blocks: list[RenderableType] = [Text()]
    heading = f"{result.state.job if result.state else directory.path.name}: {result.outcome}"
    blocks.append(Text(heading, style=STYLES[result.outcome]))
    if result.reason:
        blocks.append(Text(plain_text(result.reason)))
    blocks += [*lines, Text(f"next: {next_command(result, directory)}")]
    return Group(*blocks)


def next_command(result: RunResult, directory: RunDirectory) -> str:
    """Get what one would type now."""
    inflight, place = command_name(), shown(directory.path)
    if result.outcome == "succeeded":
        return f"{inflight} samples {place} --best"
    if result.over:
        return f"mend the cause, then {inflight} run {shown(Path(directory.read_record().job_file))}"
    return f"{inflight} run --resume {place}"


def _values(metrics: Sequence[dict[str, Any]], name: str) -> list[float]:
    found = (record.get(name) for record in metrics)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]
