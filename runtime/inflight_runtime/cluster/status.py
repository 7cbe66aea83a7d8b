"""``inflight status`` of jobs in a cluster: once, or with ``--watch`` for as long as they change."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from inflight_runtime.cluster.connection import JOBS, ClusterError, Connection, Object
from inflight_runtime.cluster.jobs import Job, find_job, missing, read_job
from inflight_runtime.cluster.picture import picture, plain_line, table
from inflight_runtime.cluster.watching import moments, ticking
from inflight_runtime.local.text import plain_text
from inflight_runtime.target import Cluster

TICK_S: Final = 1.0
"""The clock in the picture goes on without news."""
LINE_EVERY_S: Final = 5.0
RATE_WINDOW_S: Final = 60.0
WIDEST: Final = 400
EXIT_FAILED: Final = 1


async def show_status(cluster: Cluster, name: str, console: Console, *, watch: bool) -> int:
    """Show one job, or with an empty name all of them; the exit code.

    Raises:
        ClusterError: it cannot be done; the message says why.
    """
    async with await Connection.open(cluster) as connection:
        if name and not connection.namespace:
            raise ClusterError("--all-namespaces: a job is in one of them; name it by -n")
        if watch:
            with Screen(console) as screen:
                return await (_watch_job(connection, name, screen) if name else _watch_jobs(connection, screen))
        if name:
            console.print(picture(await find_job(connection, name), _place(connection), _now()))
        else:
            objects, _ = await connection.list(JOBS, {})
            jobs = [read_job(one) for one in objects]
            # As wide as it needs to be, as kubectl's: a narrow terminal wraps it, and nothing is lost.
            console.width = WIDEST
            console.print(_table_or_words(connection, jobs))
    return 0


class Screen:
    """A picture that is drawn again in place on a terminal; a line now and then elsewhere.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        terminal = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if terminal else None
        self._last: dict[str, tuple[str, str, float]] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def draws(self) -> bool:
        """Whether pictures are wanted, not lines."""
        return self._live is not None

    def draw(self, shown: RenderableType) -> None:
        """Draw a picture in place of the last one."""
        if self._live is not None:
            self._live.update(shown, refresh=True)

    def line(self, subject: str, line: str, phase: str) -> None:
        """Print a line about ``subject`` if it is new, at once when its phase is, else every few seconds."""
        last, last_phase, printed = self._last.get(subject, ("", "", 0.0))
        now = time.monotonic()
        if line == last or (phase == last_phase and now - printed < LINE_EVERY_S):
            return
        self._last[subject] = (line, phase, now)
        self.event(line)

    def event(self, text: str) -> None:
        """Print one thing that happened, above the picture."""
        self._console.print(Text(plain_text(text)), soft_wrap=True, highlight=False)


class Pace:
    """Optimizer steps per second, from what the operator tells now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def steps_per_s(self, step: int, now: float) -> float | None:
        """Take a number of steps in; the rate over the last :data:`RATE_WINDOW_S`, ``None`` before it is known."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # rolled back to a checkpoint
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        # The first number stands for steps of a time that was not watched, and stood for a while itself.
        return (last - first) / (end - begin) if len(self._seen) > 2 and end > begin else None


async def _watch_job(connection: Connection, name: str, screen: Screen) -> int:
    uid, pace = "", Pace()
    source = moments(connection, JOBS, {"fieldSelector": f"metadata.name={name}"}, screen.event)
    async with aclosing(_jobs(source)) as seen:
        async for jobs in seen:
            job = next((one for one in jobs if not uid or one.uid == uid), None)
            if job is None and not uid:
                raise await missing(connection, name)
            if job is None:
                screen.event(f"{name} was deleted{' and made anew' if jobs else ''}")
                return EXIT_FAILED
            uid = job.uid
            rate = pace.steps_per_s(job.step, time.monotonic()) if job.status.phase == "Running" else None
            if screen.draws:
                screen.draw(picture(job, _place(connection), _now(), rate))
            else:
                key = f"{job.phase} {' '.join(one.type + one.reason for one in job.troubles)}"
                screen.line(name, plain_line(job, rate), key)
            if job.over:
                return EXIT_FAILED if job.status.phase == "Failed" else 0
    raise AssertionError("a watch has no end of its own")


async def _watch_jobs(connection: Connection, screen: Screen) -> int:
    known: set[str] = set()
    async with aclosing(_jobs(moments(connection, JOBS, {}, screen.event))) as seen:
        async for jobs in seen:
            if screen.draws:
                screen.draw(_table_or_words(connection, jobs))
                continue
            names = {_title(connection, job): job for job in jobs}
            for gone in sorted(known - names.keys()):
                screen.event(f"{gone}  deleted")
            known = set(names)
            for name, job in names.items():
                screen.line(name, f"{name}  {plain_line(job)}", job.phase)
    raise AssertionError("a watch has no end of its own")


async def _jobs(source: AsyncGenerator[dict[str, Object], None]) -> AsyncGenerator[list[Job], None]:
    async with aclosing(ticking(source, TICK_S)) as ticks:
        async for objects in ticks:
            yield [read_job(objects[key]) for key in sorted(objects)]


def _table_or_words(connection: Connection, jobs: Sequence[Job]) -> RenderableType:
    if not jobs:
        return Text(f"no jobs in {connection.place} of context {connection.context}")
    return table(jobs, _now(), namespaces=not connection.namespace)


def _title(connection: Connection, job: Job) -> str:
    return job.name if connection.namespace else f"{job.namespace}/{job.name}"


def _place(connection: Connection) -> str:
    return f"{connection.place}, context {connection.context}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
