"""Waits with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from .errors import ClusterError

POLL_S = 0.05
POLL_LONGER = 0.05
"""Part of the time waited so far: who waits long asks less often, and is told late by as little."""
Found = TypeVar("Found")


def eventually(what: str, probe: Callable[[], Found | None], deadline_s: float = 30.0) -> Found:
    """Call ``probe`` until it returns something true, and return that.

    Raises:
        ClusterError: it did not within ``deadline_s``; the message names ``what`` and the last thing it returned.
    """
    began = time.monotonic()
    while not (found := probe()):
        waited = time.monotonic() - began
        if waited > deadline_s:
            raise ClusterError(f"{what}: not within {deadline_s:g} s (last seen: {found!r})")
        time.sleep(max(POLL_S, POLL_LONGER * waited))
    return found
