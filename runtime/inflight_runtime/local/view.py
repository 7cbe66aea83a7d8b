"""What a person sees while a run goes on: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inflight_runtime.local.snapshot import Snapshot
from inflight_runtime.local.text import clock_text, plain_text
from inflight_runtime.protocol import Member
from inflight_runtime.terminal import progress_bar

PLAIN_EVERY_S: Final = 5.0
STALE_AFTER_S: Final = 3.0
STATE_STYLES: Final = {
    "READY": "green",
    "UPDATING": "cyan",
    "JOINING": "yellow",
    "SYNCING": "yellow",
    "EVICTED": "red",
}
PHASE_STYLES: Final = {"ready": "green", "done": "green", "restarting": "red", "failed": "red", "stopping": "yellow"}


class View(Protocol):
    """Shows a run."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, text: str) -> None:
        """Tell one thing that happened."""

    def show(self, snapshot: Snapshot) -> None:
        """Show this moment; called once or twice a second."""


def make_view(console: Console, *, plain: bool = False) -> View:
    """Choose the view that fits where the output goes."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainView(console)
    return LiveView(console)


class PlainView:
    """One line every few seconds, for a file, a pipe or a CI log."""

    def __init__(
        self, console: Console, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._next = self._began
        self._last = ""
        self._phase = ""
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def event(self, text: str) -> None:
        """Print it at once."""
        self._print(f"[{clock_text(self._clock() - self._began)}] {text}")

    def show(self, snapshot: Snapshot) -> None:
        """Print a line when it is time for one and there is something new to say."""
        now = self._clock()
        ended = snapshot.phase != self._phase and snapshot.step != self._step
        self._phase = snapshot.phase
        if snapshot.state is None or (now < self._next and not ended):
            return
        line = plain_line(snapshot)
        if line != self._last:
            self._next, self._last, self._step = now + self._every_s, line, snapshot.step
            self._print(f"[{clock_text(snapshot.elapsed_s)}] {line}")

    def _print(self, line: str) -> None:
        self._console.print(plain_text(line), markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A picture that is drawn again in place, with events scrolling by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn by show() only: a refresh thread of its own would draw over a terminal that is being torn down.
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, text: str) -> None:
        """Print it above the picture."""
        self._console.print(Text(plain_text(text), style="dim"))

    def show(self, snapshot: Snapshot) -> None:
        """Draw it."""
        self._live.update(picture(snapshot), refresh=True)


def plain_line(snapshot: Snapshot) -> str:
    """One moment of a run in one line."""
    state = snapshot.state
    if state is None:
        return snapshot.phase
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    parts += [f"{name} {value}" for name, value in numbers(snapshot)]
    parts.append(f"servers {snapshot.serving}/{len(state.members)} at v{state.policy_version.step}")
    if snapshot.eta_s is not None:
        parts.append(f"about {clock_text(snapshot.eta_s)} left")
    if snapshot.restarts:
        parts.append("restarts " + ", ".join(f"{name} {count}" for name, count in snapshot.restarts.items()))
    if snapshot.silent_s > STALE_AFTER_S:
        parts.append(f"(coordinator silent for {snapshot.silent_s:.0f} s)")
    return "  ".join(parts)


def numbers(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The numbers of the newest step that people look at, named and written out."""
    found: list[tuple[str, str]] = []
    reward = snapshot.metric("reward_mean")
    if reward is not None:
        found.append(("reward", f"{reward:.3f}"))
    found += [(plain_text(name), f"{value:.3f}") for name, value in snapshot.reward_parts.items()]
    staleness = snapshot.metric("staleness_mean")
    if staleness is not None:
        found.append(("staleness", f"{staleness:.2f}"))
    if snapshot.steps_per_s is not None:
        found.append(("steps/s", f"{snapshot.steps_per_s:.2f}"))
    tokens = snapshot.metric("tokens_per_second")
    if tokens is not None:
        found.append(("tokens/s", f"{tokens:,.0f}"))
    return found


def picture(snapshot: Snapshot) -> RenderableType:
    """One moment of a run as a picture of a few lines."""
    rows: list[RenderableType] = [_headline(snapshot)]
    if snapshot.state is not None:
        rows.append(progress_bar(snapshot.step, snapshot.steps, snapshot.eta_s))
        if snapshot.state.step:
            line = Text("  ")
            for name, value in numbers(snapshot):
                line.append(f"{name} ", style="dim").append(value, style="bold").append("   ")
            rows.append(line)
        if snapshot.state.evaluation:
            rows.append(_evaluation(snapshot.state.evaluation))
        rows.append(_groups(snapshot))
    rows.append(_servers(snapshot))
    others = _others(snapshot)
    if others.plain:
        rows.append(others)
    return Group(*rows)


def _headline(snapshot: Snapshot) -> Text:
    line = Text.assemble((snapshot.job, "bold"), "  ", (snapshot.phase, "cyan"), "  ", clock_text(snapshot.elapsed_s))
    if snapshot.silent_s > STALE_AFTER_S:
        line.append(f"  coordinator silent for {snapshot.silent_s:.0f} s", style="yellow")
    return line


def _evaluation(evaluation: Mapping[str, float]) -> Text:
    line = Text(f"  held-out at step {evaluation.get('step', 0):.0f}   ", style="dim")
    for name, number in evaluation.items():
        if name not in ("step", "attempts", "attempts_failed"):
            line.append(f"{plain_text(name.removesuffix('_mean'))} ", style="dim").append(f"{number:.3f}   ")
    return line


def _groups(snapshot: Snapshot) -> Text:
    assert snapshot.state is not None
    state = snapshot.state
    capacity = state.capacity
    line = Text("  ", style="dim")
    line.append(f"groups {state.groups.get('leased', 0)} generating, ")
    waiting = state.groups.get("completed", 0) + state.groups.get("assigned", 0)
    line.append(f"{waiting} waiting")
    if "bound" in capacity:
        line.append(f" (at most {capacity['bound']} together)")
    for count, name in (
        (sum(state.dropped.values()), "dropped"),
        (state.attempts_failed, "attempts failed"),
        (state.leases_expired, "leases expired"),
        (state.steps_skipped, "steps skipped"),
    ):
        if count:
            line.append(f"   {name} {count}", style="yellow")
    return line


def _servers(snapshot: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=True)
    for column in ("server", "state", "version", "pause", "update", "generating", "note"):
        right = column in ("pause", "update", "generating")
        table.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    members = {member.server_id: member for member in snapshot.state.members} if snapshot.state else {}
    processes = {role.name: role for role in snapshot.roles if role.kind == "inference"}
    for name in sorted({*members, *processes}):
        member, process = members.get(name), processes.get(name)
        note = member.reason if member else ""
        if process is not None:
            if process.restarts:
                note = f"{process.restarts} restarts  {note}".strip()
            if process.phase != "ready":
                note = f"{process.note or process.phase}  {note}".strip()
        table.add_row(Text(plain_text(name)), *_server_cells(member), Text(plain_text(note), style="yellow"))
    return table


def _server_cells(member: Member | None) -> tuple[Text, str, str, str, str]:
    if member is None:
        return Text("starting", style="yellow"), "-", "-", "-", "-"
    version = f"{member.version.epoch}.{member.version.step}" if member.version else "-"
    queue = f"+{member.waiting}" if member.waiting else ""
    return (
        Text(member.state, style=STATE_STYLES.get(member.state, "")),
        version,
        _milliseconds(member.last_pause_ms),
        _milliseconds(member.last_update_ms),
        f"{member.running}{queue}/{member.capacity}",
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _others(snapshot: Snapshot) -> Text:
    line = Text("  ")
    for role in snapshot.roles:
        if role.kind == "inference":
            continue
        if len(line.plain) > 2:
            line.append("   ")
        line.append(f"{role.name} ", style="dim").append(role.phase, style=PHASE_STYLES.get(role.phase, ""))
        if role.restarts:
            line.append(f" ({role.restarts} restarts)", style="yellow")
    return line if len(line.plain) > 2 else Text()
