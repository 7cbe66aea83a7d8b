"""Long polls: wait until something may have changed."""

from __future__ import annotations

import asyncio
import contextlib


class Signal:
    """Wakes everybody who waits. Lives on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._waiting = 0
        self._closed = False

    @property
    def waited_for(self) -> bool:
        """Whether anybody waits."""
        return self._waiting > 0

    def wake(self) -> None:
        """Wake all who wait now."""
        if self._waiting:
            self._event.set()
            self._event = asyncio.Event()

    def close(self) -> None:
        """Wake all who wait, and let nobody wait any more."""
        self._closed = True
        self.wake()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next :meth:`wake`; false when it did not come in time or never will."""
        if self._closed or timeout_s <= 0:
            return False
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
                return not self._closed
            return False
        finally:
            self._waiting -= 1
