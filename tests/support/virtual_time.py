"""An event loop whose clock jumps to the next timer: hours of timeouts in milliseconds, and the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
ROUND_S = 1e-6


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code without I/O: when nothing is ready, time passes at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for something without a timer")
        # Each round takes some time, else code that waits for a moment that is nearer than the clock's grain spins.
        self._loop.now += max(0.0 if ready else timeout or 0.0, ROUND_S)
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Like ``asyncio.run``."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
