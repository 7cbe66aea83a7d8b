"""SIGTERM and SIGINT: the step is finished and a checkpoint written, within a deadline."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from typing import Final

logger = logging.getLogger(__name__)

STOP_DEADLINE_S: Final = 60.0
"""The process ends this long after the signal, whatever it is doing; a checkpoint on disk is whole either way."""


class StopRequest:
    """Set by the first SIGTERM or SIGINT; later ones change nothing."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    @property
    def requested(self) -> bool:
        """Whether to stop after the step in progress."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it."""
        return 128 + (self.signum or 0)

    def install(self) -> None:
        """Handle both signals from now on; to be called in the main thread."""
        # Started here: a handler must not start threads or log, which takes locks that its own thread may hold.
        threading.Thread(target=self._watch, name="stop-deadline", daemon=True).start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda received, _: self.note(received))

    def note(self, signum: int) -> None:
        """A signal has come, to this rank or to another: the deadline begins."""
        if not self.requested:
            self.signum = signum
            self._heard.put(signum)  # safe in a handler

    def _watch(self) -> None:
        name = signal.Signals(self._heard.get()).name
        logger.info("%s: finishing the step, then a checkpoint; at most %g s", name, STOP_DEADLINE_S)
        time.sleep(STOP_DEADLINE_S)
        logger.error("not done %g s after the signal: ending without a further checkpoint", STOP_DEADLINE_S)
        os._exit(self.exit_code)
