"""Blocking torch calls beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str = "weights") -> asyncio.Future[T]:
    """Run a blocking call in a daemon thread of its own; the future belongs to the running loop.

    A thread per call: a call that hangs until its timeout then holds up neither other servers, as in a shared pool, nor
    the end of the process, as threads of an executor do. Cancelling the future does not stop the call.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
