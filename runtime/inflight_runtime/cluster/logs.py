"""``inflight logs`` of a job in a cluster: its pods' logs side by side, as they are or as they grow."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from inflight_runtime.api.selectors import selector_text
from inflight_runtime.cluster.connection import (
    JOBS,
    PODS,
    ClusterError,
    Connection,
    RefusedError,
    UnreachableError,
)
from inflight_runtime.cluster.jobs import find_job, parse_time, read_job
from inflight_runtime.cluster.pods import ROLES, Container, containers
from inflight_runtime.cluster.watching import moments
from inflight_runtime.target import Cluster
from inflight_runtime.terminal import PrefixedLines

QUEUE_LINES: Final = 2000
"""Lines on their way to the terminal; a container whose log comes faster waits."""
AT_ONCE: Final = 16
"""Logs that are read at the same time when nothing is followed."""
MOST_FOLLOWED: Final = 64
SILENCE_S: Final = 300.0
"""After that a log is asked for anew: a cut link looks like a quiet container."""
READ_DEADLINE_S: Final = 30.0
IDLE_S: Final = 2.0
AGAIN_S: Final = 1.0
MOST_FAILURES: Final = 20
"""In a row, of one log."""
EXIT_NOTHING: Final = 1
LONG_AGO: Final = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted.

    Attributes:
        job: the job's name.
        what: a role, a pod, or the end of a pod's name (``inference-0``); empty for all of the job.
        tail: lines of each log to begin with; ``None`` for all.
        previous: of the container before the last restart.
    """

    job: str
    what: str = ""
    tail: int | None = None
    previous: bool = False

    @property
    def selector(self) -> str:
        """Label selector of the pods."""
        return selector_text(self.job, self.what if self.what in ROLES else "")

    def wants(self, pod: str) -> bool:
        """Whether a pod that the selector finds is meant."""
        return self.what in ("", *ROLES) or pod in (self.what, f"{self.job}-{self.what}")


@dataclass(frozen=True, slots=True)
class _Line:
    source: str
    stamp: str
    text: str


async def show_logs(
    cluster: Cluster, request: Request, out: PrefixedLines, tell: Callable[[str], None], *, follow: bool
) -> int:
    """Write the logs; the exit code.

    Args:
        cluster: where the job is.
        request: what is wanted.
        out: where the lines go.
        tell: where everything goes that is no line of a log.
        follow: go on until the job is over.

    Raises:
        ClusterError: it cannot be done; the message says why.
    """
    async with await Connection.open(cluster) as connection:
        if not connection.namespace:
            raise ClusterError("--all-namespaces: the job is in one of them; name it by -n")
        if not request.job:
            raise ClusterError("give the job whose logs you want; inflight status -n NAMESPACE lists them")
        job = await find_job(connection, request.job)
        pods, _ = await connection.list(PODS, {"labelSelector": request.selector})
        there = [one for one in containers(pods) if request.wants(one.pod)]
        if not there and request.what not in ("", *ROLES):
            names = sorted({one.pod for one in containers(pods)})
            hint = f"there are {', '.join(names)}" if names else "the job has no pods at the moment"
            raise ClusterError(f"{request.what} is no role ({', '.join(ROLES)}) and no pod of {job.name}; {hint}")
        whose = f"of {request.what} " if request.what else ""
        nothing = f"there is no pod {whose}at the moment; {job.name} is {job.phase}"
        troubles = [f"{one.type}: {one.reason}: {one.message}".rstrip(": ") for one in job.troubles[:1]]
        if not there:
            nothing = "; ".join([nothing, *troubles])
            if not follow or job.over:
                tell(nothing)
                return EXIT_NOTHING
            tell(f"{nothing}; waiting")
        if follow:
            await Following(connection, request, out, tell).run()
            return 0
        return await show_once(connection, request, there, out, tell)


async def show_once(
    connection: Connection,
    request: Request,
    there: Sequence[Container],
    out: PrefixedLines,
    tell: Callable[[str], None],
) -> int:
    """Write the logs as they are, in the order of time; the exit code.

    Args:
        connection: where to ask.
        request: what is wanted.
        there: the containers that are meant.
        out: where the lines go.
        tell: where everything goes that is no line of a log.
    """
    wanted = [one for one in there if (one.has_previous if request.previous else one.started)]
    if request.previous and not wanted:
        tell("no container has been started again (a trainer that is started again gets a new pod)")
    elif not request.previous:
        _tell_waiting([one for one in there if not one.started], tell)
    query = _query(request.tail, previous=request.previous)
    if request.tail is None:
        # All of it may be more than fits into memory: one after another.
        read = [
            await _read(connection, one, query, lambda line: out.line(line.source, line.text), tell) for one in wanted
        ]
        return 0 if any(read) else EXIT_NOTHING
    merged: list[_Line] = []
    turn = asyncio.Semaphore(AT_ONCE)

    async def take_turn(one: Container) -> bool:
        async with turn:
            return await _read(connection, one, query, merged.append, tell)

    read = await asyncio.gather(*map(take_turn, wanted))
    for line in sorted(merged, key=lambda line: _when(line.stamp)):
        out.line(line.source, line.text)
    return 0 if any(read) else EXIT_NOTHING


class Following:
    """One ``inflight logs -f``: a task for the pods, one for each log, and a queue between them and the terminal."""

    def __init__(
        self, connection: Connection, request: Request, out: PrefixedLines, tell: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._request = request
        self._out = out
        self._tell = tell
        self._queue: asyncio.Queue[_Line] = asyncio.Queue(QUEUE_LINES)
        self._logs: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        self._running: set[tuple[str, str, int]] = set()
        self._seen = asyncio.Event()
        self._told: set[tuple[str, str, int]] = set()

    async def run(self) -> None:
        """Until the job is over and its last line is out."""
        watcher = asyncio.create_task(self._watch_pods())
        try:
            while True:
                if watcher.done():
                    watcher.result()
                try:
                    line = await asyncio.wait_for(self._queue.get(), IDLE_S)
                except TimeoutError:
                    if self._seen.is_set() and not self._alive() and await self._over():
                        return
                    continue
                self._out.line(line.source, line.text)
                if self._queue.empty():
                    self._out.flush()
        finally:
            tasks = [watcher, *self._logs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _alive(self) -> bool:
        return any(not task.done() for task in self._logs.values()) or not self._queue.empty()

    async def _over(self) -> bool:
        try:
            job = read_job(await self._connection.get(JOBS, self._request.job))
        except RefusedError as error:
            if error.status != 404:
                raise
            self._tell(f"{self._request.job} was deleted")
            return True
        except UnreachableError:
            return False  # the watch of the pods tells of it, and gives up in time
        return job.over

    async def _watch_pods(self) -> None:
        query = {"labelSelector": self._request.selector}
        async with aclosing(moments(self._connection, PODS, query, self._tell)) as seen:
            async for pods in seen:
                there = [one for one in containers(pods.values()) if self._request.wants(one.pod)]
                self._running = {one.key for one in there if one.running}
                for one in there:
                    if one.started and one.key not in self._logs:
                        self._begin(one, first=not self._seen.is_set())
                if not self._seen.is_set():
                    _tell_waiting([one for one in there if not one.started], self._tell)
                self._seen.set()

    def _begin(self, one: Container, *, first: bool) -> None:
        alive = sum(not task.done() for task in self._logs.values())
        if alive >= MOST_FOLLOWED:
            if one.key not in self._told:
                self._tell(f"{one.source}: not followed, {alive} logs are; name a role or a pod")
                self._told.add(one.key)
            return
        # What begins while we look on is shown from its first line.
        tail = self._request.tail if first else None
        self._logs[one.key] = asyncio.create_task(self._follow(one, tail))

    async def _follow(self, one: Container, tail: int | None) -> None:
        newest, failures = "", 0
        while True:
            since = newest
            query = _query(tail, follow=True, since=since)
            try:
                async with aclosing(_stamped(self._connection, one, query, SILENCE_S)) as lines:
                    async for line in lines:
                        if since and _when(line.stamp) <= _when(since):
                            continue  # asked for again from its second on
                        newest, failures = line.stamp, 0
                        await self._queue.put(line)
            except RefusedError as error:
                if one.key not in self._running:
                    return  # gone, and its log with it
                failures += 1
                if failures == MOST_FAILURES:
                    self._tell(f"{one.source}: {error.words or error}")
            except UnreachableError:
                failures += 1
            if failures >= MOST_FAILURES:
                return
            # Its end is often known here before the kubelet has told the API server.
            await asyncio.sleep(AGAIN_S)
            if one.key not in self._running:
                return


def _query(tail: int | None, *, previous: bool = False, follow: bool = False, since: str = "") -> dict[str, str]:
    query = {"timestamps": "true"}
    if previous:
        query["previous"] = "true"
    if follow:
        query["follow"] = "true"
    if since:
        query["sinceTime"] = since
    elif tail is not None:
        query["tailLines"] = str(tail)
    return query


async def _stamped(
    connection: Connection, one: Container, query: dict[str, str], silence_s: float
) -> AsyncGenerator[_Line, None]:
    newest = ""
    async with aclosing(connection.log(one.pod, {**query, "container": one.name}, silence_s)) as lines:
        async for raw in lines:
            whole = raw.decode(errors="replace")
            stamp, _, text = whole.partition(" ")
            if parse_time(stamp) is None:
                yield _Line(one.source, newest, whole)  # the rest of a line that came in parts
            else:
                newest = stamp
                yield _Line(one.source, stamp, text)


async def _read(
    connection: Connection,
    one: Container,
    query: dict[str, str],
    take: Callable[[_Line], None],
    tell: Callable[[str], None],
) -> bool:
    """Read a log to its end; one that cannot be read keeps no other from being shown."""
    try:
        async with aclosing(_stamped(connection, one, query, READ_DEADLINE_S)) as lines:
            async for line in lines:
                take(line)
    except RefusedError as error:
        if error.status in (401, 403):
            raise
        tell(f"{one.source}: {error.words or error}")
        return False
    return True


def _tell_waiting(waiting: Iterable[Container], tell: Callable[[str], None]) -> None:
    for one in waiting:
        tell(f"{one.source}: {one.waits_for}")


def _when(stamp: str) -> tuple[datetime.datetime, str]:
    # The text as well: Python's times end at microseconds.
    return parse_time(stamp) or LONG_AGO, stamp
