"""Leadership: of several operators one acts, the one that holds a Lease; after client-go's ``leaderelection``.

No two hold at once, whatever their wall clocks say. A holder counts from the moment it *sent* its last renewal that
succeeded, and gives up ``give_up_s`` later. Whoever waits counts from the moment it *saw* the Lease last change, which
is never before that, and takes over ``duration_s`` later. Only lengths of time are compared, each on its own monotonic
clock, and every write names the version it was made for, so that of two writers one is refused.

Outside of that promise: a Lease that is deleted and made anew while it is held looks free at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from inflight_operator.builders import Manifest
from inflight_operator.kube import Kube, KubeError

logger = logging.getLogger(__name__)

TRY_EVERY_S: Final = 2.0
JITTER: Final = 0.2
"""Part of a pause that is random, so that those who wait do not all write at the same moment."""
RELEASE_S: Final = 3.0
RELEASE_PAUSE_S: Final = 0.1
TRIES_TO_RELEASE: Final = 10
"""A renewal of ours that is still on its way may come between."""
TRIES_TO_RENEW: Final = 3
"""Calls that fit into the time until giving up, when each one hangs."""


class LeaseLost(Exception):  # noqa: N818  it is no mistake of anybody's
    """This process must not act any more; the message says why."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a Lease says."""

    version: str
    holder: str
    duration_s: float
    transitions: int
    taken: bool
    """Somebody has held it before."""


class Leadership:
    """One contender for a Lease.

    The order of use is :meth:`acquire`, :meth:`hold` beside the work, and when that has ended :meth:`release`.

    Args:
        kube: the API.
        namespace: of the Lease.
        name: of the Lease, which must exist: rights to create one cannot be limited to a name.
        identity: of this process, never of another one that may be alive.
        duration_s: seconds after which others take over from a holder that fell silent.
        renew_every_s: seconds between renewals.
        give_up_s: seconds without a renewal after which the holder takes it that it is none any more.
        clock: a clock that is never set back.

    Raises:
        ValueError: the times leave no room for a second try, or none between giving up and the take-over.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_s: float = 15.0,
        renew_every_s: float = 3.0,
        give_up_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < 2 * renew_every_s <= give_up_s < duration_s:
            raise ValueError("2 * renew_every_s <= give_up_s < duration_s must hold")
        if not identity:
            raise ValueError("identity is empty, which in a Lease means that nobody holds it")
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = math.ceil(duration_s)
        self._renew_every_s = renew_every_s
        self._give_up_s = give_up_s
        self._clock = clock
        self._call_s = give_up_s / TRIES_TO_RENEW
        self._seen: _Record | None = None
        self._seen_at = 0.0
        self._renewed_at = 0.0
        """When the last renewal that succeeded was sent."""
        self._complained: set[str] = set()
        """Kinds of errors that were logged since a call last succeeded."""
        self._told = ""

    async def acquire(self) -> None:
        """Wait until this process holds the Lease."""
        while True:
            try:
                async with asyncio.timeout(self._call_s):
                    if await self._try_to_take():
                        logger.info("%s now holds Lease %s/%s", self._identity, self._namespace, self._name)
                        return
            except (KubeError, TimeoutError) as error:
                self._complain(error)
            pause = TRY_EVERY_S * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
            await asyncio.sleep(min(pause, self._free_in_s()))

    async def hold(self) -> None:
        """Renew the Lease until cancelled; from :meth:`acquire` on, this must run without a pause.

        Raises:
            LeaseLost: another process holds it, or may soon. What this one does must end within the rest of
                ``duration_s``.
        """
        pause, why = self._renew_every_s, "no call succeeded"
        while True:
            await asyncio.sleep(max(0.0, min(pause, self._left_s())))
            left = self._left_s()
            if left <= 0:
                raise LeaseLost(f"the Lease could not be renewed for {self._give_up_s:g} s: {why}")
            try:
                async with asyncio.timeout(min(left, self._call_s)):
                    await self._renew()
                pause = self._renew_every_s
            except (KubeError, TimeoutError) as error:
                self._complain(error)
                why = _words(error)
                pause = self._renew_every_s / TRIES_TO_RENEW

    def check(self) -> None:
        """Whether this process still may act, by its own clock: to be asked right before each write.

        A process that was stopped for a while goes on where it was, before :meth:`hold` has its turn.

        Raises:
            LeaseLost: it may not.
        """
        if self._left_s() <= 0:
            raise LeaseLost(f"the Lease has not been renewed for {self._give_up_s:g} s")

    async def release(self) -> None:
        """Let another one take over at once, if this process holds the Lease; what it did must have ended.

        Does its best for three seconds, and raises nothing.
        """
        try:
            async with asyncio.timeout(RELEASE_S):
                for _ in range(TRIES_TO_RELEASE):
                    if await self._try_to_release():
                        return
                    await asyncio.sleep(RELEASE_PAUSE_S)
        except Exception as error:
            logger.warning(
                "Lease %s/%s could not be released: %s. It runs out by itself in %d s",
                *(self._namespace, self._name, _words(error), self._duration_s),
            )

    def _free_in_s(self) -> float:
        """Seconds until the holder's time is over, if it is not renewed; a pause at least."""
        if self._seen is None or not self._seen.holder:
            return TRY_EVERY_S
        left = self._seen_at + self._seen.duration_s - self._clock()
        return left if left > 0 else TRY_EVERY_S

    def _left_s(self) -> float:
        return self._renewed_at + self._give_up_s - self._clock()

    async def _try_to_take(self) -> bool:
        found = await self._look()
        if found is None:
            missing = (
                f"Lease {self._namespace}/{self._name} does not exist: apply manifests/. Waiting until it is there"
            )
            self._tell(logging.WARNING, missing)
            return False
        if found.holder and found.holder != self._identity:
            silent_s = self._clock() - self._seen_at
            self._tell(logging.INFO, f"Waiting: {found.holder} holds Lease {self._namespace}/{self._name}")
            if silent_s < found.duration_s:
                return False
            logger.warning("%s has not renewed its Lease for %.0f s: taking over", found.holder, silent_s)
        taking = {"acquireTime": _now(), "leaseTransitions": found.transitions + found.taken}
        return await self._write(found, taking if found.holder != self._identity else {})

    async def _renew(self) -> None:
        """Renew once, in one call as a rule.

        Raises:
            LeaseLost: somebody else wrote the Lease, and it is not ours any more.
        """
        known = self._seen
        if known is not None and await self._write(known, {}):
            return
        # Somebody wrote the Lease: an answer of ours that was lost, a person's label, or another holder.
        known = await self._look()
        if known is None:
            raise KubeError(404, "NotFound", "the Lease has been deleted")
        if known.holder != self._identity:
            raise LeaseLost(f"the Lease is held by {known.holder or 'nobody'} now")
        if not await self._write(known, {}):
            raise KubeError(409, "Conflict", "somebody else keeps writing the Lease")

    async def _try_to_release(self) -> bool:
        found = await self._look()
        if found is None or found.holder != self._identity:
            return True
        return await self._patch(found, {"holderIdentity": "", "renewTime": _now()}) is not None

    async def _look(self) -> _Record | None:
        lease = await self._kube.get("Lease", self._namespace, self._name)
        self._complained.clear()
        return self._observe(lease) if lease is not None else None

    async def _write(self, known: _Record, more: dict[str, Any]) -> bool:
        """Write that we hold the Lease; ``False`` when it is no longer as it is known."""
        sent = self._clock()
        spec = {"holderIdentity": self._identity, "leaseDurationSeconds": self._duration_s, "renewTime": _now()}
        lease = await self._patch(known, {**spec, **more})
        if lease is None:
            return False
        self._observe(lease)
        self._renewed_at = sent
        self._complained.clear()
        return True

    async def _patch(self, known: _Record, spec: dict[str, Any]) -> Manifest | None:
        patch = {"metadata": {"resourceVersion": known.version}, "spec": spec}
        try:
            return await self._kube.patch("Lease", self._namespace, self._name, patch)
        except KubeError as error:
            if error.status == 409:
                return None
            raise

    def _observe(self, lease: Manifest) -> _Record:
        """Note what a Lease says, and when it last changed: after the answer came, so never too early."""
        record = _record(lease, self._duration_s)
        if self._seen is None or self._seen.version != record.version:
            self._seen, self._seen_at = record, self._clock()
        return record

    def _complain(self, error: Exception) -> None:
        kind = error.reason if isinstance(error, KubeError) else type(error).__name__
        if kind not in self._complained:
            self._complained.add(kind)
            logger.warning("Lease %s/%s: %s. Trying again", self._namespace, self._name, _words(error))

    def _tell(self, level: int, message: str) -> None:
        if message != self._told:
            self._told = message
            logger.log(level, "%s", message)


def _record(lease: Manifest, duration_s: float) -> _Record:
    spec = lease.get("spec") or {}
    version = (lease.get("metadata") or {}).get("resourceVersion")
    if not version:  # a write that names none would not be refused
        raise KubeError(0, "NoLease", "the answer of the API server is not a Lease")
    told, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    return _Record(
        version=str(version),
        holder=str(spec.get("holderIdentity") or ""),
        # The holder's own promise: another version of the operator may have another one.
        duration_s=float(told) if isinstance(told, int) and told > 0 else duration_s,
        transitions=transitions if isinstance(transitions, int) else 0,
        taken=bool(spec.get("acquireTime")),
    )


def _words(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
