"""Who holds which lease until when. In memory: renewing a lease costs no disk write.

After a restart every held lease starts a fresh term; the ledger knows who holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    fence: int
    actor_id: str
    until: float


class LeaseClock:
    """Terms of the held leases, by group id; time is passed in (monotonic seconds)."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._held: dict[int, _Held] = {}

    def hold(self, group_id: int, fence: int, actor_id: str, now: float) -> None:
        """Start a lease's term."""
        self._held[group_id] = _Held(fence, actor_id, now + self.ttl_s)

    def end(self, group_id: int, fence: int) -> None:
        """Forget a lease; nothing happens when another one is current."""
        held = self._held.get(group_id)
        if held is not None and held.fence == fence:
            del self._held[group_id]

    def renew(self, group_id: int, fence: int, actor_id: str, now: float) -> bool:
        """Start the term anew; false when the lease is not this actor's (any more)."""
        held = self._held.get(group_id)
        if held is None or held.fence != fence or held.actor_id != actor_id:
            return False
        held.until = now + self.ttl_s
        return True

    def replace(self, held: Iterable[tuple[int, int, str]], now: float) -> None:
        """Hold exactly these (group id, fence, actor id); those known already keep their term."""
        known, self._held = self._held, {}
        for group_id, fence, actor_id in held:
            before = known.get(group_id)
            if before is not None and before.fence == fence:
                self._held[group_id] = before
            else:
                self.hold(group_id, fence, actor_id, now)

    def overdue(self, now: float) -> list[tuple[int, int]]:
        """Leases whose term is over: (group id, fence)."""
        return [(group_id, held.fence) for group_id, held in self._held.items() if held.until < now]
