"""Which inference servers there are and what each may be used for. A pure state machine: time is passed in.

``JOINING -> SYNCING -> READY(v) <-> UPDATING -> READY(v')``, any -> ``EVICTED -> JOINING``. The publisher moves servers
through it; heartbeats let them join, and their absence evicts them. Kept in memory alone: servers announce themselves
again after a coordinator's restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from inflight_runtime.protocol import Member, MemberBeat, MemberReply, MemberState, ServerState, VersionField
from inflight_runtime.types import Version

USABLE: Final[frozenset[ServerState]] = frozenset({"READY", "UPDATING"})
HEARTBEAT_LOST: Final = "heartbeat lost"


class StaleMemberError(Exception):
    """The caller speaks of an epoch or a server process that is not the current one."""


class MemberStateError(ValueError):
    """A state that makes no sense as told."""


@dataclass(slots=True)
class _Server:
    beat: MemberBeat
    state: ServerState
    last_beat: float
    version: Version | None = None
    reason: str = ""
    last_pause_ms: float | None = None
    last_update_ms: float | None = None
    evicted_at: float = 0.0
    evicted_by_publisher: bool = False

    @property
    def routing(self) -> object:
        """What a router or the publisher must hear of; UPDATING servers go on generating, so they count as READY."""
        state = "READY" if self.state == "UPDATING" else self.state
        beat = self.beat
        return (beat.boot_id, beat.url, beat.capacity, beat.max_length, beat.world_size, state, self.version)


class Membership:
    """The servers by id.

    Attributes:
        revision: grows with every change that matters to routing, and across restarts of the coordinator.
    """

    def __init__(self, ttl_s: float, first_revision: int = 0) -> None:
        """Start without servers.

        Args:
            ttl_s: a server that is silent for longer is evicted; also how long the publisher's eviction holds.
            first_revision: must be larger than any revision an earlier process gave out.
        """
        self.revision = first_revision
        self._ttl_s = ttl_s
        self._servers: dict[str, _Server] = {}

    def touch(self) -> None:
        """Raise the revision for a change outside the servers (a new epoch, the end of the run)."""
        self.revision += 1

    def beat(self, beat: MemberBeat, now: float, policy: Version) -> MemberReply:
        """Take a heartbeat; it may join, re-join or break a server.

        Args:
            beat: the heartbeat.
            now: monotonic seconds.
            policy: the newest weight version; a server never seen before (this coordinator may have restarted) that
                serves a version of the present history is ready at once.
        """
        server = self._servers.get(beat.server_id)
        if server is None or server.beat.boot_id != beat.boot_id:
            joined = _Server(beat, "JOINING", now, last_pause_ms=beat.last_pause_ms)
            version = _version(beat.version)
            if server is None and version is not None and version.epoch <= policy.epoch and version.step <= policy.step:
                joined.state, joined.version = "READY", version
            if beat.broken:
                _evict(joined, beat.broken, now)
            self._servers[beat.server_id] = joined
            self.revision += 1
            return MemberReply(known=False, state=joined.state)
        before = server.routing
        server.beat, server.last_beat = beat, now
        if beat.last_pause_ms is not None:
            server.last_pause_ms = beat.last_pause_ms
        self._heed(server, beat, now, policy)
        if server.routing != before:
            self.revision += 1
        return MemberReply(known=True, state=server.state)

    def _heed(self, server: _Server, beat: MemberBeat, now: float, policy: Version) -> None:
        version = _version(beat.version)
        if beat.broken:
            if server.state != "EVICTED" or server.reason != beat.broken:
                _evict(server, beat.broken, now)
        elif server.state == "EVICTED":
            # The publisher gave it up a moment ago: let that hold for a while, or the two would run in circles.
            if not server.evicted_by_publisher or now - server.evicted_at >= self._ttl_s:
                server.state, server.version, server.reason = "JOINING", None, ""
        elif server.state in USABLE and version and server.version and server.version < version <= policy:
            # Versions only grow within a server process, so an older one is a beat that was overtaken.
            server.version = version

    def leave(self, server_id: str, boot_id: str) -> None:
        """Take a server out; nothing happens when another process has its place."""
        server = self._servers.get(server_id)
        if server is not None and server.beat.boot_id == boot_id:
            del self._servers[server_id]
            self.revision += 1

    def set_state(self, server_id: str, told: MemberState, epoch: int, now: float) -> None:
        """Take the publisher's word on a server.

        Raises:
            StaleMemberError: its epoch is not current, the server is gone, has restarted or is broken.
            MemberStateError: READY without a version.
        """
        if told.epoch != epoch:
            raise StaleMemberError(f"epoch {told.epoch} is not current, {epoch} is: another trainer has started since")
        server = self._servers.get(server_id)
        if server is None:
            raise StaleMemberError(f"server {server_id} is not a member: it has left, or has not announced itself yet")
        if server.beat.boot_id != told.boot_id:
            raise StaleMemberError(f"server {server_id} has restarted: boot id {server.beat.boot_id} is current")
        if server.beat.broken and told.state != "EVICTED":
            raise StaleMemberError(f"server {server_id} says it is broken: {server.beat.broken}")
        if told.state == "READY" and told.version is None:
            raise MemberStateError(f"server {server_id}: READY needs a version")
        before = server.routing
        if told.state == "EVICTED":
            _evict(server, told.reason or "evicted by the publisher", now)
            server.evicted_by_publisher = True
        else:
            server.state, server.reason = told.state, told.reason
            if told.state == "READY":
                server.last_beat = now  # it has just answered the publisher
            if told.version is not None:
                server.version = _version(told.version)
        if told.pause_ms is not None:
            server.last_pause_ms = told.pause_ms
        if told.update_ms is not None:
            server.last_update_ms = told.update_ms
        if server.routing != before:
            self.revision += 1

    def expire(self, now: float) -> list[str]:
        """Evict the servers that have been silent for longer than the ttl; returns their ids."""
        silent = [
            name
            for name, server in self._servers.items()
            if server.state != "EVICTED" and now - server.last_beat > self._ttl_s
        ]
        for name in silent:
            _evict(self._servers[name], HEARTBEAT_LOST, now)
        self.revision += bool(silent)
        return silent

    def capacities(self) -> list[int]:
        """Sequences that each usable server generates at once."""
        return [server.beat.capacity for server in self._usable()]

    def newest_version(self) -> Version | None:
        """The newest version that a usable server has."""
        return max((server.version for server in self._usable() if server.version is not None), default=None)

    def members(self, now: float) -> list[Member]:
        """All servers, by id."""
        return [
            Member(
                server_id=name,
                boot_id=server.beat.boot_id,
                url=server.beat.url,
                engine=server.beat.engine,
                world_size=server.beat.world_size,
                capacity=server.beat.capacity,
                max_length=server.beat.max_length,
                state=server.state,
                version=None if server.version is None else VersionField(**server.version._asdict()),
                reason=server.reason,
                running=server.beat.running,
                waiting=server.beat.waiting,
                last_pause_ms=server.last_pause_ms,
                last_update_ms=server.last_update_ms,
                seconds_since_beat=round(now - server.last_beat, 3),
            )
            for name, server in sorted(self._servers.items())
        ]

    def _usable(self) -> Iterator[_Server]:
        return (server for server in self._servers.values() if server.state in USABLE)


def _version(field: VersionField | None) -> Version | None:
    return None if field is None else Version(field.epoch, field.step)


def _evict(server: _Server, reason: str, now: float) -> None:
    server.state, server.reason, server.version = "EVICTED", reason, None
    server.evicted_at, server.evicted_by_publisher = now, False
