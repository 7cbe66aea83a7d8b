"""Notices an environment that blocks the event loop, which nothing inside the loop could."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from typing import Final

log = logging.getLogger(__name__)

CHECK_S: Final = 1.0
WARN_AFTER_S: Final = 5.0


class LoopWatchdog:
    """A thread that the event loop has to answer; it says where the loop is stuck, and ends the process in the end.

    Ending it lets the leases expire and the supervisor start a fresh actor: better than one that hangs for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up_after_s: float) -> None:
        """Start watching the loop of the calling thread.

        Args:
            loop: the loop.
            give_up_after_s: seconds without a sign of life after which the process ends with exit code 1.
        """
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._give_up_after_s = give_up_after_s
        self._seen = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _alive(self) -> None:
        self._seen = time.monotonic()

    def _watch(self) -> None:
        warned = False
        while not self._closed.wait(CHECK_S):
            if self._loop.is_closed():
                return
            silent = time.monotonic() - self._seen
            if silent < WARN_AFTER_S:
                warned = False
            elif not warned:
                warned = True
                log.warning(
                    "the event loop has been blocked for %.0f s; blocking code in an async rollout belongs into "
                    "client.run_blocking(...). It is here:\n%s",
                    silent,
                    self._where(),
                )
            if silent > self._give_up_after_s:
                log.error("the event loop has been blocked for %.0f s: giving up", silent)
                logging.shutdown()
                os._exit(1)
            self._loop.call_soon_threadsafe(self._alive)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "(unknown)"
