"""Loopback ports for the roles of a local run."""

from __future__ import annotations

import random
from typing import Final

from inflight_runtime.api import JobError, Problem
from inflight_runtime.config.checks import check_port_free, raise_for

FIRST: Final = 20_000
LAST: Final = 32_000
"""Below the kernel's ephemeral range, so that no outgoing connection takes a port between our look and the bind."""
ATTEMPTS: Final = 200


class PortPool:
    """Gives out ports that are free and gives none out twice."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._given: set[int] = set()
        self._random = random.SystemRandom()

    def take(self) -> int:
        """Get a free port.

        Raises:
            JobError: none was found in a bounded number of tries.
        """
        for _ in range(ATTEMPTS):
            port = self._random.randint(FIRST, LAST)
            if port not in self._given and not check_port_free(self._host, port, ""):
                self._given.add(port)
                return port
        reason = f"no free port between {FIRST} and {LAST} on {self._host}"
        raise JobError([Problem("", None, reason, "end some of the servers there")])

    def claim(self, port: int, field: str) -> int:
        """Take exactly this port, which ``field`` asked for.

        Raises:
            JobError: it is taken.
        """
        raise_for(check_port_free(self._host, port, field))
        self._given.add(port)
        return port
