"""Runs an environment's blocking code off the event loop: bounded threads, a deadline for each call, cheap when quick.

Calls that one group's attempts make in the same turn of the event loop share one thread hop, so that a trivial reward
costs microseconds. A hop that is not through after a moment is taken apart: what has not started yet gets threads of
its own, so slow calls run side by side and one that hangs holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

SPLIT_AFTER_S: Final = 0.02
DEFAULT_THREADS: Final = 8
MAX_HUNG: Final = 64


class BlockingTimeoutError(TimeoutError):
    """Blocking code of the environment did not return within its deadline."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None
    started: float | None = None

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self.result = self.function(*self.args)
        except Exception as error:
            self.error = error
        except BaseException as error:  # SystemExit in a reward must end neither the thread nor the run
            self.error = RuntimeError(f"the environment raised {type(error).__name__}: {error}")

    def deliver(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class _Hop:
    """Calls that one thread makes one after the other, until the loop takes those away that have not started."""

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: list[_Call]) -> None:
        self.loop = loop
        self.calls = calls
        self.lock = threading.Lock()
        self.position = 0
        self.finished = False
        self.abandoned = False
        self.timer: asyncio.TimerHandle | None = None

    def run(self) -> bool:
        """Make the calls; false when the loop has given this thread up meanwhile."""
        while True:
            with self.lock:
                if self.abandoned or self.position >= len(self.calls):
                    self.finished = True
                    break
                call = self.calls[self.position]
                self.position += 1
            call.run()
        if not self.abandoned:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._deliver)
        return not self.abandoned

    def _deliver(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for call in self.calls:
            call.deliver()

    def take_unstarted(self) -> list[_Call]:
        with self.lock:
            rest = self.calls[self.position :]
            del self.calls[self.position :]
            return rest


class BlockingPool:
    """A bounded pool of daemon threads; one that hangs past its deadline is given up and replaced, up to a bound.

    The queue needs no bound of its own: each attempt in flight waits for at most the calls it has made itself.
    """

    def __init__(self, threads: int = DEFAULT_THREADS, max_hung: int = MAX_HUNG) -> None:
        """Make a pool.

        Args:
            threads: calls that run at once.
            max_hung: threads that may hang for good before further calls are refused.
        """
        self._threads = threads
        self._max_hung = max_hung
        self._queue: queue.SimpleQueue[_Hop | None] = queue.SimpleQueue()
        self._alive = 0
        self._idle = 0
        self._hung = 0
        self._lock = threading.Lock()

    @property
    def hung(self) -> int:
        """Threads given up because their call did not return."""
        return self._hung

    def submit(self, calls: list[_Call]) -> None:
        """Run ``calls`` in one thread. Called on the event loop; results arrive in their futures."""
        if self._hung >= self._max_hung:
            error = BlockingTimeoutError(
                f"{self._hung} blocking calls of the environment hang and hold a thread each; no more are started. "
                "Give the environment's own calls a timeout"
            )
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)
            return
        loop = asyncio.get_running_loop()
        hop = _Hop(loop, calls)
        hop.timer = loop.call_later(SPLIT_AFTER_S, self._check, hop)
        with self._lock:
            if self._idle == 0 and self._alive < self._threads:
                self._start_thread()
        self._queue.put(hop)

    def close(self) -> None:
        """Let idle threads end; hanging ones are daemons and end with the process."""
        with self._lock:
            for _ in range(self._alive):
                self._queue.put(None)

    def _start_thread(self) -> None:
        self._alive += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            hop = self._queue.get()
            with self._lock:
                self._idle -= 1
            if hop is None:
                with self._lock:
                    self._alive -= 1
                return
            if not hop.run():
                with self._lock:
                    self._hung -= 1  # it did return in the end; its place has been filled
                return

    def _check(self, hop: _Hop) -> None:
        """Timer of a hop that is not through: spread what has not started, give up what is over its deadline."""
        if hop.finished:
            return
        now = time.monotonic()
        if hop.position == 0:  # still queued: its calls have not begun to use up their time
            with self._lock:
                if self._alive < self._threads:
                    self._start_thread()
            hop.timer = hop.loop.call_later(SPLIT_AFTER_S, self._check, hop)
            return
        for call in hop.take_unstarted():
            self.submit([call])
        with hop.lock:
            running = hop.calls[-1]
            left = running.timeout_s - (now - (running.started or now))
            hop.abandoned = left <= 0 and not hop.finished
        if not hop.abandoned:
            hop.timer = hop.loop.call_later(max(left, SPLIT_AFTER_S), self._check, hop)
            return
        for call in hop.calls[:-1]:
            call.deliver()
        if not running.future.done():
            running.future.set_exception(
                BlockingTimeoutError(
                    f"{getattr(running.function, '__qualname__', running.function)} did not return within "
                    f"{running.timeout_s:g} s"
                )
            )
        with self._lock:
            self._alive -= 1
            self._hung += 1
            if self._alive < self._threads and not self._queue.empty():
                self._start_thread()


class BlockingBatcher:
    """Gathers the calls made in one turn of the event loop into one hop of the pool. One for each group."""

    def __init__(self, pool: BlockingPool) -> None:
        self._pool = pool
        self._waiting: list[_Call] = []

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """Call ``function(*args)`` in a thread.

        Raises:
            BlockingTimeoutError: it ran longer than ``timeout_s`` seconds; its thread is given up.
            Exception: whatever the function raised.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, args, timeout_s, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(call)
        return await call.future

    def _flush(self) -> None:
        calls, self._waiting = self._waiting, []
        calls = [call for call in calls if not call.future.done()]
        if calls:
            self._pool.submit(calls)
