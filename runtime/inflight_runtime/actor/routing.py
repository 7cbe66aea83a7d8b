"""Which server gets a request: pure choice, and the circuit breaker it looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from inflight_runtime.protocol import Member, ServerState
from inflight_runtime.types import Version

SERVING_STATES: Final[frozenset[ServerState]] = frozenset({"READY", "UPDATING"})
BREAKER_THRESHOLD: Final = 2
BREAKER_COOLDOWN_S: Final = 1.0
BREAKER_LONGEST_S: Final = 30.0


class ServerKey(NamedTuple):
    """One process of a server: a restart has another boot id and starts with a clean record."""

    server_id: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class Server:
    """What routing has to know of a member."""

    server_id: str
    boot_id: str
    url: str
    state: ServerState
    version: Version | None
    capacity: int
    reason: str = ""

    @property
    def key(self) -> ServerKey:
        """The process this is."""
        return ServerKey(self.server_id, self.boot_id)

    @classmethod
    def of(cls, member: Member) -> Server:
        """Read a member of the coordinator's snapshot."""
        version = None if member.version is None else Version(member.version.epoch, member.version.step)
        return cls(
            member.server_id,
            member.boot_id,
            member.url.rstrip("/"),
            member.state,
            version,
            member.capacity,
            member.reason,
        )


@dataclass(slots=True, eq=False)
class Breaker:
    """Circuit breaker of one server process.

    Closed until ``BREAKER_THRESHOLD`` failures in a row; then open for a cool-down that doubles with every failed
    probe; after it one request is let through as a probe, whose success closes the circuit.
    """

    failures: int = 0
    open_until: float | None = None
    cooldown_s: float = BREAKER_COOLDOWN_S
    probing: bool = False

    def allows(self, now: float) -> bool:
        """Whether a request may go to this server at ``now`` (seconds, monotonic)."""
        return self.open_until is None or (now >= self.open_until and not self.probing)

    def begin(self) -> None:
        """A request is sent: when the circuit is open, it is the probe."""
        self.probing = self.open_until is not None

    def success(self) -> None:
        """A request was answered: the circuit closes."""
        self.failures, self.open_until, self.cooldown_s, self.probing = 0, None, BREAKER_COOLDOWN_S, False

    def failure(self, now: float) -> None:
        """A request failed for reasons of the server or the way to it."""
        self.failures += 1
        if self.open_until is not None and not self.probing:
            return  # one of those that were under way when the circuit opened
        if self.probing:
            self.cooldown_s = min(self.cooldown_s * 2, BREAKER_LONGEST_S)
            self.open_until, self.probing = now + self.cooldown_s, False
        elif self.failures >= BREAKER_THRESHOLD:
            self.open_until = now + self.cooldown_s

    def withdrawn(self) -> None:
        """A request ended without a verdict (cancelled, or refused for reasons of its own)."""
        self.probing = False


@dataclass(slots=True, eq=False)
class ServerRecord:
    """What this actor remembers of one server process."""

    in_flight: int = 0
    """Sequences this actor has asked of it and not got yet."""
    last_pick: int = 0
    """Serial number of the last request sent to it: ties go to the one that has waited longest."""
    breaker: Breaker = field(default_factory=Breaker)
    exchanges: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """Requests under way, each with the reason why it was given up (empty: it was not)."""

    def give_up(self, reason: str) -> None:
        """Break off what is under way: this process will not answer any more."""
        for exchange in self.exchanges:
            self.exchanges[exchange] = reason
            exchange.cancel()


def choose(
    servers: Sequence[Server],
    record: Callable[[ServerKey], ServerRecord],
    *,
    min_version: Version,
    affinity: ServerKey | None = None,
    avoid: Collection[ServerKey] = (),
    now: float = 0.0,
) -> Server | None:
    """Pick a server for one request.

    Among those that serve (READY, or UPDATING: it goes on generating) at least ``min_version`` and whose circuit lets a
    request through: the one of ``affinity``, else the least loaded (sequences in flight by capacity). Servers in
    ``avoid``, which have failed this request before, come only when there is no other.
    """
    usable = [
        server
        for server in servers
        if server.state in SERVING_STATES
        and server.version is not None
        and server.version >= min_version
        and record(server.key).breaker.allows(now)
    ]
    fresh = [server for server in usable if server.key not in avoid]
    for server in fresh:
        if server.key == affinity:
            return server
    return min(
        fresh or usable,
        key=lambda server: (
            record(server.key).in_flight / server.capacity,
            record(server.key).last_pick,
            server.server_id,
        ),
        default=None,
    )


def explain(servers: Sequence[Server], records: Mapping[ServerKey, ServerRecord], min_version: Version) -> str:
    """Say why no server can be chosen, for an error message."""
    if not servers:
        return "no inference server has joined"
    lines = []
    for server in servers:
        record = records.get(server.key)
        if server.state not in SERVING_STATES:
            why = f"{server.state}" + (f" ({server.reason})" if server.reason else "")
        elif server.version is None or server.version < min_version:
            why = f"at version {server.version or 'none'}, wanted {min_version} or later"
        elif record is not None and record.breaker.open_until is not None:
            why = f"circuit open after {record.breaker.failures} failures"
        else:
            why = server.state
        lines.append(f"{server.server_id}: {why}")
    return "; ".join(lines)
