"""A keyed work queue, after client-go's: level-triggered controllers are made of one of these and a function.

A key is worked on by one worker at a time. However often it is added while it waits, it is worked on once; added while
it is being worked on, once more afterwards. Work that fails is tried again with a growing delay, and never holds up
other keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.5
LAST_RETRY_S: Final = 60.0
WORK_DEADLINE_S: Final = 60.0

Work = Callable[[str], Awaitable[float | None]]
"""Does all there is to do for a key; seconds after which it wants to be called again, or ``None``."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of the work function that has ended.

    Attributes:
        key: what was worked on.
        seconds: how long it took.
        error: what it raised, ``None`` for success.
        failures: how often in a row it has failed now.
        again_in_s: seconds until it is called again without being added, ``None`` for never.
    """

    key: str
    seconds: float
    error: BaseException | None
    failures: int
    again_in_s: float | None


class WorkQueue:
    """Runs a work function over keys.

    All methods belong to one event loop.

    Args:
        work: see :data:`Work`. An exception counts as failure; so does exceeding ``deadline_s``.
        workers: keys worked on at once.
        first_retry_s: seconds until failed work is tried again; doubles with each failure in a row, up to a minute.
        deadline_s: seconds one call may take before it is cancelled.
        on_attempt: told of each call that ended, for metrics and status.
    """

    def __init__(
        self,
        work: Work,
        *,
        workers: int = 8,
        first_retry_s: float = FIRST_RETRY_S,
        deadline_s: float = WORK_DEADLINE_S,
        on_attempt: Callable[[Attempt], None] = lambda _: None,
    ) -> None:
        self._work = work
        self._workers = workers
        self._first_retry_s = first_retry_s
        self._deadline_s = deadline_s
        self._on_attempt = on_attempt
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._since: dict[str, float] = {}
        """Keys that wait, with the time they were added (event loop's clock)."""
        self._running: dict[str, float] = {}
        """Keys that are being worked on, with the time they were taken."""
        self._again: set[str] = set()
        """Keys added while they are being worked on."""
        self._later: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._moved = 0.0
        """When a call last began or ended."""

    def __len__(self) -> int:
        """Keys that wait for a worker now."""
        return self._ready.qsize()

    def add(self, key: str) -> None:
        """Have a key worked on as soon as a worker is free. A retry that is due later becomes unnecessary."""
        if (timer := self._later.pop(key, None)) is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        elif key not in self._since:
            self._since[key] = self._now()
            self._ready.put_nowait(key)

    def add_after(self, key: str, delay_s: float) -> None:
        """Have a key worked on ``delay_s`` seconds from now, unless it is due before that anyway."""
        if key in self._since or key in self._again:
            return
        due = self._now() + delay_s
        if (timer := self._later.get(key)) is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._later[key] = asyncio.get_running_loop().call_at(due, self._due, key)

    def forget(self, key: str) -> None:
        """Drop what is remembered of a key (it has been deleted): its failures and its timer."""
        self._failures.pop(key, None)
        if (timer := self._later.pop(key, None)) is not None:
            timer.cancel()

    def oldest_wait_s(self) -> float:
        """Seconds that the longest waiting key has waited, or the longest call has taken; 0 when there is neither."""
        began = [*self._since.values(), *self._running.values()]
        return self._now() - min(began) if began else 0.0

    def stuck_s(self) -> float:
        """Seconds for which nothing has moved though there is work; 0 when there is none.

        Long queues are no reason to restart a process, calls that never end are.
        """
        if not self._since and not self._running:
            return 0.0
        waits = [self._now() - max(self._moved, min(self._since.values()))] if self._since else []
        return max([*waits, *(self._now() - began for began in self._running.values())])

    async def run(self) -> None:
        """Work until cancelled."""
        self._moved = self._now()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._workers):
                    group.create_task(self._worker(), name=f"worker-{number}")
        finally:
            for timer in self._later.values():
                timer.cancel()
            self._later.clear()

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            del self._since[key]
            self._running[key] = self._moved = self._now()
            try:
                await self._attempt(key)
            finally:
                del self._running[key]
                self._moved = self._now()
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)

    async def _attempt(self, key: str) -> None:
        began, error, again_in = self._now(), None, None
        try:
            async with asyncio.timeout(self._deadline_s):
                again_in = await self._work(key)
            self._failures.pop(key, None)
        except Exception as raised:
            error = raised
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again_in = min(LAST_RETRY_S, self._first_retry_s * 2 ** min(failures - 1, 30))
        if again_in is not None:
            self.add_after(key, again_in)
        attempt = Attempt(key, self._now() - began, error, self._failures.get(key, 0), again_in)
        with contextlib.suppress(Exception):
            self._on_attempt(attempt)

    def _due(self, key: str) -> None:
        self._later.pop(key, None)
        self.add(key)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
