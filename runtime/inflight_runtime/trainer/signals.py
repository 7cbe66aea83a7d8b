"""SIGTERM and SIGINT: the step is finished and a checkpoint written, within a deadline; before the first, at once."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from typing import Final

logger = logging.getLogger(__name__)

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class EarlyEnd:
    """Until :meth:`over`, a signal ends this process at once, whatever it is doing.

    A container's first process is not ended by a signal that it does not handle, and Python handles none while torch
    is being loaded or waits for another node.
    """

    def __init__(self) -> None:
        """Make it; nothing is handled yet."""
        self._reading, self._writing = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="early-end", daemon=True)

    def install(self) -> None:
        """Handle both signals from now on; to be called in the main thread."""
        os.set_blocking(self._writing, False)
        self._watcher.start()
        # Written to by the C half of a handler, which does not wait for the interpreter.
        signal.set_wakeup_fd(self._writing)
        for signum in END_SIGNALS:
            signal.signal(signum, lambda *_: None)

    def over(self) -> None:
        """Leave signals to the handlers that have been set meanwhile; one that has come ends the process yet."""
        if self._writing >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._writing)
            self._writing = -1
            self._watcher.join()

    def _watch(self) -> None:
        told = os.read(self._reading, 1)
        os.close(self._reading)
        if told:
            logger.info("%s before the ranks were started", signal.Signals(told[0]).name)
            os._exit(128 + told[0])


class StopRequest:
    """Set by the first SIGTERM or SIGINT; later ones change nothing."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        """Make the request; nothing is handled yet.

        Args:
            deadline_s: seconds after the signal when the process ends, whatever it is doing; a checkpoint on disk is
                whole either way.
        """
        self._deadline_s = deadline_s
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
        for signum in END_SIGNALS:
            signal.signal(signum, lambda received, _: self.note(received))

    def note(self, signum: int) -> None:
        """A signal has come, to this rank or to another: the deadline begins."""
        if not self.requested:
            self.signum = signum
            self._heard.put(signum)  # safe in a handler

    def _watch(self) -> None:
        name = signal.Signals(self._heard.get()).name
        logger.info("%s: finishing the step, then a checkpoint; at most %g s", name, self._deadline_s)
        time.sleep(self._deadline_s)
        logger.error(
            "not done %g s after the signal (checkpoint.stopSeconds): ending without a further checkpoint",
            self._deadline_s,
        )
        os._exit(self.exit_code)
