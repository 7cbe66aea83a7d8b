"""SIGTERM and SIGINT: the step is finished and a checkpoint written, within a deadline."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Final

logger = logging.getLogger(__name__)

STOP_DEADLINE_S: Final = 60.0
"""The process ends this long after the signal, whatever it is doing; a checkpoint on disk is whole either way."""


class StopRequest:
    """Set by the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.signum: int | None = None

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
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            return
        self.signum = signum
        # A handler must not take locks that its thread may hold: the timer's thread does the talking.
        for delay, action in ((0.0, self._announce), (STOP_DEADLINE_S, self._give_up)):
            timer = threading.Timer(delay, action)
            timer.daemon = True
            timer.start()

    def _announce(self) -> None:
        name = signal.Signals(self.signum or 0).name
        logger.info("%s: finishing the step, then a checkpoint; at most %g s", name, STOP_DEADLINE_S)

    def _give_up(self) -> None:
        logger.error("not done %g s after the signal: ending without a further checkpoint", STOP_DEADLINE_S)
        os._exit(self.exit_code)
