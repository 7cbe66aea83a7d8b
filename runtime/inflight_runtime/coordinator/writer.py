"""Group commit: all ledger operations that arrived while the last transaction was being written share the next one.

A durable transaction costs an fsync, whatever is in it. One thread owns the ledger; the event loop hands it operations
and gets their results, in order, once they are durable.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from inflight_runtime.coordinator.ledger import Ledger
from inflight_runtime.coordinator.snapshot import Snapshot

T = TypeVar("T")

LARGEST_BATCH: Final = 512
MOST_WAITING: Final = 20_000
LINGER_S: Final = 0.002
"""How long a transaction is held open for company: far below a rollout's time, and it halves the work under load."""

log = logging.getLogger(__name__)


class WriterBusyError(Exception):
    """Too many operations wait; try again later."""


class WriterClosedError(Exception):
    """The coordinator is shutting down."""


@dataclass(slots=True)
class _Job(Generic[T]):
    operation: Callable[[Ledger], T]
    future: asyncio.Future[T]
    result: T | None = None
    error: BaseException | None = None


class Writer:
    """Runs operations on the ledger in its own thread."""

    def __init__(self, ledger: Ledger, on_commit: Callable[[Snapshot, int, float], None]) -> None:
        """Start the thread; must be called on the event loop.

        Args:
            ledger: belongs to the thread from now on.
            on_commit: called on the loop after each transaction, before its results are delivered, with the numbers,
                the count of operations and the seconds it took.
        """
        self._ledger = ledger
        self._on_commit = on_commit
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether operations are taken."""
        return not self._closed and self._thread.is_alive()

    async def run(self, operation: Callable[[Ledger], T]) -> T:
        """Run ``operation`` and return its result once it is durable; what it raises is raised here.

        Raises:
            WriterBusyError: too many operations wait already.
            WriterClosedError: the coordinator is shutting down.
        """
        if not self.alive:
            raise WriterClosedError("the coordinator is shutting down")
        if self._jobs.qsize() >= MOST_WAITING:
            raise WriterBusyError(f"{MOST_WAITING} operations wait for the disk")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(operation, future))  # type: ignore[arg-type]
        # When the caller is cancelled, so is the future; the operation goes on and its result is nobody's.
        return await future

    async def close(self) -> None:
        """Finish what waits, close the ledger and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                time.sleep(LINGER_S)
                jobs, more = [job], True
                while len(jobs) < LARGEST_BATCH and not self._jobs.empty():
                    following = self._jobs.get()
                    if following is None:
                        more = False
                        break
                    jobs.append(following)
                self._commit(jobs)
                if not more:
                    break
        finally:
            self._ledger.close()

    def _commit(self, jobs: list[_Job[object]]) -> None:
        begun = time.perf_counter()
        try:
            with self._ledger.transaction():
                for job in jobs:
                    self._run_one(job)
        except Exception as error:
            log.exception("a transaction of %d operations could not be written", len(jobs))
            for job in jobs:
                job.error = error
        snapshot = self._ledger.snapshot()
        self._loop.call_soon_threadsafe(self._deliver, jobs, snapshot, time.perf_counter() - begun)

    def _run_one(self, job: _Job[object]) -> None:
        try:
            with self._ledger.savepoint():
                job.result = job.operation(self._ledger)
        except Exception as error:
            job.error = error

    def _deliver(self, jobs: list[_Job[object]], snapshot: Snapshot, seconds: float) -> None:
        self._on_commit(snapshot, len(jobs), seconds)
        for job in jobs:
            if job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)
