"""The publisher's side of one server process: one pair, one task, its own deadline and its own failures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from inflight_runtime.aio import forget
from inflight_runtime.config.roles import WeightSyncConfig
from inflight_runtime.protocol import (
    InitGroupRequest,
    Member,
    MemberState,
    ServerState,
    ServerVersion,
    VersionField,
    WeightUpdateReply,
    WeightUpdateRequest,
)
from inflight_runtime.types import Version
from inflight_runtime.weights.control import ServerControl, ServerRefusedError, ServerUnreachableError
from inflight_runtime.weights.errors import StaleEpochError, WeightTransferError
from inflight_runtime.weights.packing import Bucket, plan_buckets
from inflight_runtime.weights.snapshot import Snapshot
from inflight_runtime.weights.threads import in_thread
from inflight_runtime.weights.transports.pair import Backend, PairGroup

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 30.0
LONGEST_JOIN_S: Final = 20.0
REPLY_GRACE_S: Final = 1.0
"""How long after the deadline, or after the pair broke, the server's own words are waited for."""
UPDATING_AFTER_S: Final = 0.25
"""An update that is over sooner is not announced: nobody could see it, and a small model has ten of them a second."""
UNREAD_GRACE_S: Final = 0.5
"""How long a send may go on after the server has answered that it serves the version: then it was not read at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A snapshot in the order of publication (``number`` counts from 1), with its plan."""

    number: int
    snapshot: Snapshot
    buckets: list[Bucket]

    @classmethod
    def plan(cls, number: int, snapshot: Snapshot, bucket_bytes: int) -> Published:
        """Cut the snapshot once for all servers."""
        return cls(number, snapshot, plan_buckets(snapshot.specs, bucket_bytes))

    @property
    def version(self) -> Version:
        """Of the snapshot."""
        return self.snapshot.version


class Hub(Protocol):
    """What a link needs of its publisher."""

    epoch: int
    config: WeightSyncConfig
    store_port: int

    @property
    def newest(self) -> Published | None:
        """What every server should serve."""

    async def tell(self, server_id: str, state: MemberState) -> None:
        """Set a server's state in the coordinator."""

    def delivered(self, server_id: str, entry: dict[str, Any]) -> None:
        """An update ended, well or not."""


class LinkFailedError(Exception):
    """An update failed; the pair is closed and the server is evicted until a later attempt works."""


class ServerLink:
    """Keeps one server process (a server id with one boot id) at the newest version."""

    def __init__(self, hub: Hub, control: ServerControl, member: Member) -> None:
        self.server_id = member.server_id
        self.boot_id = member.boot_id
        self.version: Version | None = None
        """What this process is known to serve, of this publisher's versions."""
        self._hub = hub
        self._control = control
        self._world_size = 1 + member.world_size
        self._pair: PairGroup | None = None
        self._attempt = 0
        self._fallback: Backend | None = None
        self._last_number = 0
        self._recheck = False
        self._announcing: asyncio.TimerHandle | None = None
        self._telling: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is something newer to send."""
        self._wake.set()

    def recheck(self) -> None:
        """The coordinator has lost sight of this server's version: settle it by the server's own status."""
        if self.version is not None:
            self._recheck = True
            self._wake.set()

    async def run(self) -> None:
        """Deliver versions until cancelled.

        Raises:
            StaleEpochError: another trainer has taken over.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            published = await self._next()
            try:
                await self._deliver(published)
                backoff = FIRST_BACKOFF_S
            except LinkFailedError as error:
                await self._evict(str(error))
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    async def close(self) -> None:
        """Leave the pair on both sides; a server that does not answer is not waited for long."""
        self._announce_nothing()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        await self._leave()

    async def _leave(self) -> None:
        pair, self._pair = self._pair, None
        if pair is None:
            return
        with contextlib.suppress(ServerRefusedError, ServerUnreachableError):
            await self._control.destroy_group(pair.tag)
        # The destructor joins gloo's threads: not on the event loop.
        await in_thread(pair.close)

    # --- one update ---------------------------------------------------------------------------------------------------

    async def _next(self) -> Published:
        while True:
            self._wake.clear()
            newest = self._hub.newest
            if newest is not None and (self._recheck or self.version != newest.version):
                return newest
            await self._wake.wait()

    async def _deliver(self, published: Published) -> None:
        """Bring the server to a version, make that known, and log how it went."""
        entry: dict[str, Any] = {
            "time": time.time(),
            "server": self.server_id,
            "epoch": published.version.epoch,
            "step": published.version.step,
            "update_ms": None,
            "receive_ms": None,
            "pause_ms": None,
            "commit_ms": None,
            "ok": False,
            "reason": "",
            "skipped": published.number - self._last_number - 1 if self._last_number else 0,
        }
        started = time.perf_counter()
        try:
            # A fresh pair, or a doubt: the server itself knows best, and a version is not sent twice.
            ask = self._pair is None or self._recheck
            self._recheck = False
            reply = await self._settled(published) if ask else None
            if reply is None:
                reply = await self._update(published)
            entry["update_ms"] = 1e3 * (time.perf_counter() - started)
            self.version = published.version
            self._last_number = published.number
            entry |= reply.model_dump(include={"receive_ms", "pause_ms", "commit_ms"})
            await self._tell("READY", version=published.version, update_ms=entry["update_ms"], pause_ms=reply.pause_ms)
            entry["ok"] = True
        except LinkFailedError as error:
            entry["reason"] = str(error)
            raise
        finally:
            if entry["ok"] or entry["reason"]:
                self._hub.delivered(self.server_id, entry)

    async def _update(self, published: Published) -> WeightUpdateReply:
        """Tell the coordinator, join if need be, send.

        Raises:
            LinkFailedError: it did not work; the pair is closed.
        """
        if self.version is None:
            self._announce("SYNCING")
        else:
            loop = asyncio.get_running_loop()
            self._announcing = loop.call_later(UPDATING_AFTER_S, self._announce, "UPDATING")
        if self._pair is None:
            self._pair = await self._join()
        return await self._send_or_settle(self._pair, published)

    async def _send_or_settle(self, pair: PairGroup, published: Published) -> WeightUpdateReply:
        try:
            reply = await self._send(pair, published)
            self._check(reply, published)
        except ServerRefusedError as error:
            await self._leave()
            raise LinkFailedError(str(error)) from error
        except (WeightTransferError, ServerUnreachableError) as error:
            await self._leave()
            try:
                settled = await self._settled(published)
            except LinkFailedError as later:
                raise LinkFailedError(f"{error}; then: {later}") from error
            if settled is None:
                raise LinkFailedError(str(error)) from error
            return settled
        return reply

    async def _send(self, pair: PairGroup, published: Published) -> WeightUpdateReply:
        """Ask for the update and broadcast beside it.

        A sender waits until the receiver reads. When the server refuses, closing the pair on its side ends that.
        """
        snapshot = published.snapshot
        deadline_s = self._hub.config.deadline_s
        request = WeightUpdateRequest.model_construct(
            epoch=snapshot.version.epoch,
            step=snapshot.version.step,
            tag=pair.tag,
            tensors=list(snapshot.specs),
            bucket_bytes=self._hub.config.bucket_bytes,
            digest=snapshot.digest,
            timeout_seconds=deadline_s,
        )
        sending = in_thread(lambda: broadcast_all(pair, snapshot, published.buckets, deadline_s))
        posting: asyncio.Future[WeightUpdateReply] = asyncio.ensure_future(
            self._control.update(request, deadline_s + REPLY_GRACE_S)
        )
        both: list[asyncio.Future[Any]] = [sending, posting]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and (broken := sending.exception()) is not None:
                # The server's own words, if they come, say more than "connection closed by peer".
                await asyncio.wait([posting], timeout=REPLY_GRACE_S)
                if not posting.done():
                    raise broken
            reply = await posting
            await asyncio.wait([sending], timeout=UNREAD_GRACE_S)
            if not sending.done() or sending.exception() is not None:
                await self._leave()  # it serves the version and has not read this send: a doubled request
            return reply
        finally:
            for future in both:
                future.add_done_callback(forget)
            posting.cancel()

    def _check(self, reply: WeightUpdateReply, published: Published) -> None:
        wanted = (*published.version, self.boot_id, published.snapshot.digest)
        found = (reply.epoch, reply.step, reply.boot_id, reply.digest)
        if found != wanted:
            raise WeightTransferError(f"the server answered (epoch, step, boot id, digest) {found}, not {wanted}")

    async def _settled(self, published: Published) -> WeightUpdateReply | None:
        """Ask the server itself whether it already serves this very version; the reply that was lost, as far as known.

        Raises:
            LinkFailedError: it cannot be asked, is broken, or is another process by now.
        """
        try:
            status = await self._control.status()
        except (ServerRefusedError, ServerUnreachableError) as error:
            raise LinkFailedError(str(error)) from error
        if status.boot_id != self.boot_id:
            raise LinkFailedError(f"the server has restarted (boot id {status.boot_id}, was {self.boot_id})")
        if status.broken:
            raise LinkFailedError(f"the server is broken until it restarts: {status.broken}")
        served = status.version
        wanted = (*published.version, published.snapshot.digest)
        if served is None or (served.epoch, served.step, status.digest) != wanted:
            return None
        return WeightUpdateReply(
            epoch=served.epoch,
            step=served.step,
            boot_id=status.boot_id,
            digest=status.digest,
            receive_ms=status.last_receive_ms or 0.0,
            pause_ms=status.last_pause_ms or 0.0,
            commit_ms=status.last_commit_ms or 0.0,
        )

    # --- the pair -----------------------------------------------------------------------------------------------------

    def _backend(self) -> Backend:
        transport = self._hub.config.transport
        if transport != "auto":
            return transport
        return self._fallback or ("nccl" if torch.cuda.is_available() else "gloo")

    async def _join(self) -> PairGroup:
        """Meet the server under a fresh tag.

        Raises:
            LinkFailedError: it refused, did not come in time, or is another process by now.
        """
        self._attempt += 1
        backend = self._backend()
        tag = f"{self._hub.epoch}-{self.server_id}-{self.boot_id}-{self._attempt}"
        host, port = self._hub.config.bind_host, self._hub.store_port
        timeout_s = min(self._hub.config.deadline_s, LONGEST_JOIN_S)
        request = InitGroupRequest(
            epoch=self._hub.epoch,
            tag=tag,
            world_size=self._world_size,
            master_address=host,
            master_port=port,
            backend=backend,
            timeout_seconds=timeout_s,
        )
        joining = in_thread(
            lambda: PairGroup.join(
                address=host,
                port=port,
                tag=tag,
                rank=0,
                world_size=self._world_size,
                backend=backend,
                timeout_s=timeout_s,
            )
        )
        posting: asyncio.Future[ServerVersion] = asyncio.ensure_future(
            self._control.init_group(request, timeout_s + REPLY_GRACE_S)
        )
        both: list[asyncio.Future[Any]] = [posting, joining]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for future in both:
                if future.done():
                    future.result()  # raises what went wrong first, without waiting for the other side's deadline
            if (boot_id := posting.result().boot_id) != self.boot_id:
                raise LinkFailedError(f"the server has restarted (boot id {boot_id}, was {self.boot_id})")
            return joining.result()
        except BaseException as error:
            joining.add_done_callback(_close_late)
            if isinstance(error, ServerRefusedError | ServerUnreachableError | WeightTransferError):
                raise LinkFailedError(f"cannot join {tag!r}: {error}") from error
            raise
        finally:
            posting.add_done_callback(forget)
            posting.cancel()

    # --- the coordinator ----------------------------------------------------------------------------------------------

    async def _tell(
        self,
        state: ServerState,
        *,
        version: Version | None = None,
        update_ms: float | None = None,
        pause_ms: float | None = None,
        reason: str = "",
    ) -> None:
        self._announce_nothing()
        if self._telling is not None:
            await asyncio.wait([self._telling])
            error = self._telling.exception()
            self._telling = None
            if isinstance(error, StaleEpochError):
                raise error
        await self._put(state, version, update_ms, pause_ms, reason)

    def _announce(self, state: ServerState) -> None:
        """Tell, and wait for no answer; what is told next waits for it, so READY cannot overtake it."""
        self._announcing = None
        self._telling = asyncio.ensure_future(self._put(state))
        self._telling.add_done_callback(forget)

    def _announce_nothing(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None

    async def _put(
        self,
        state: ServerState,
        version: Version | None = None,
        update_ms: float | None = None,
        pause_ms: float | None = None,
        reason: str = "",
    ) -> None:
        field = None if version is None else VersionField(epoch=version.epoch, step=version.step)
        await self._hub.tell(
            self.server_id,
            MemberState(
                epoch=self._hub.epoch,
                boot_id=self.boot_id,
                state=state,
                version=field,
                reason=reason,
                update_ms=update_ms,
                pause_ms=pause_ms,
            ),
        )

    async def _evict(self, reason: str) -> None:
        if self._last_number == 0 and self._backend() == "nccl" and self._hub.config.transport == "auto":
            self._fallback = "gloo"  # no GPU there, or the very GPU the trainer is on
        self.version = None
        await self._leave()
        with contextlib.suppress(LinkFailedError):
            await self._tell("EVICTED", reason=reason)


def broadcast_all(pair: PairGroup, snapshot: Snapshot, buckets: list[Bucket], deadline_s: float) -> None:
    """Send all buckets of a snapshot (blocking).

    Raises:
        WeightTransferError: the peer is gone or did not read in time.
    """
    deadline = time.monotonic() + deadline_s
    for bucket in buckets:
        part = snapshot.flat[bucket.start : bucket.end]
        if pair.backend == "nccl":
            part = part.cuda()
        pair.broadcast(part, deadline - time.monotonic())


def _close_late(future: asyncio.Future[PairGroup]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
