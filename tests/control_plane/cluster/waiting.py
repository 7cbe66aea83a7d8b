"""Waits with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from .errors import ClusterError

POLL_S = 0.05
Found = TypeVar("Found")


def eventually(what: str, probe: Callable[[], Found | None], deadline_s: float = 30.0) -> Found:
    """Call ``probe`` until it returns something true, and return that.

    Raises:
        ClusterError: it did not within ``deadline_s``; the message names ``what`` and the last thing it returned.
    """
    end = time.monotonic() + deadline_s
    while not (found := probe()):
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not within {deadline_s:g} s (last seen: {found!r})")
        time.sleep(POLL_S)
    return found
