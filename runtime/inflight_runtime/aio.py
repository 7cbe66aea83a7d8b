"""Event loops of the busiest roles: uvloop's, which needs less CPU for the same messages than asyncio's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a role to its end, as :func:`asyncio.run` does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def forget(future: asyncio.Future[Any]) -> None:
    """Done callback: see a failure that has been told by other means, so that nobody logs it as never retrieved."""
    if not future.cancelled():
        future.exception()


class BackgroundLoop:
    """An event loop in a daemon thread, for a role whose main thread computes (the trainer)."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            TimeoutError: it took longer than ``timeout_s`` seconds; it is cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs on the loop and end its thread."""
        if not self._thread.is_alive():
            return
        self.submit(self._cancel_all())
        self._thread.join(timeout_s)

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.call_soon(self.loop.stop)
