"""Publishes weight versions to every live server, each over a pair of its own, while training goes on.

Runs on an event loop beside the computing thread (:mod:`inflight_runtime.aio`). The newest snapshot is what counts: a
version still unsent when the next one is ready is skipped. Servers come, go and restart; none is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Protocol, Self

from inflight_runtime.config.roles import WeightSyncConfig
from inflight_runtime.coordinator.client import CoordinatorError, CoordinatorUnavailableError, FencedError
from inflight_runtime.protocol import Member, MembersReply, MemberState
from inflight_runtime.types import Version
from inflight_runtime.weights.control import ServerControl, new_session
from inflight_runtime.weights.errors import StaleEpochError
from inflight_runtime.weights.link import LinkFailedError, Published, ServerLink
from inflight_runtime.weights.snapshot import Snapshot
from inflight_runtime.weights.transports.pair import serve_store

logger = logging.getLogger(__name__)

POLL_S: Final = 5.0
POLL_PAUSE_S: Final = 0.1
"""Between two polls: every update changes the membership, and each change would be one more poll."""
CLOSE_S: Final = 3.0


class Membership(Protocol):
    """What the publisher asks of :class:`~inflight_runtime.coordinator.client.CoordinatorClient`."""

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        """Wait for a membership newer than ``revision``."""

    async def set_member_state(self, server_id: str, request: MemberState) -> None:
        """Set a server's state."""


class Publisher:
    """Brings every server to the newest snapshot.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        client: Membership,
        *,
        epoch: int,
        token: str,
        config: WeightSyncConfig,
        log: Callable[[dict[str, Any]], None] = lambda entry: None,
    ) -> None:
        """Make a publisher; nothing is opened before :meth:`start`.

        Args:
            client: the coordinator.
            epoch: this trainer's; once a newer one is seen, publishing ends with :class:`StaleEpochError`.
            token: the job's bearer token, for the servers.
            config: transport, deadline, bucket size, address of the rendezvous.
            log: gets one dict for each update that ended: ``time, server, epoch, step, update_ms, receive_ms,
                pause_ms, commit_ms, ok, reason, skipped``.
        """
        self.epoch = epoch
        self.config = config
        self.store_port = 0
        self.skipped = 0
        """Versions that some server never got because a newer one was ready, over all servers."""
        self._client = client
        self._token = token
        self._log = log
        self._newest: Published | None = None
        self._links: dict[str, ServerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._watcher: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._store: list[object] = []  # the rendezvous lives as long as something holds it
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def newest(self) -> Published | None:
        """What every server should serve."""
        return self._newest

    @property
    def versions(self) -> dict[str, Version | None]:
        """What each live server is known to serve, of this trainer's versions."""
        return {server: link.version for server, link in self._links.items()}

    async def start(self) -> None:
        """Open the rendezvous and watch the membership. Done by the first :meth:`publish` if not before.

        Raises:
            OSError: ``config.bind_host`` is no address of this machine.
        """
        if self._watcher is not None:
            return
        store, self.store_port = serve_store(self.config.bind_host)
        self._store.append(store)
        self._session = await self._exit.enter_async_context(new_session(self._token))
        self._watcher = asyncio.create_task(self._watch(), name="publisher")

    async def publish(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` what every server should serve, and return; sending goes on beside.

        Raises:
            StaleEpochError: another trainer has taken over.
            ValueError: the snapshot is of another epoch, or not newer than the last one.
        """
        self._raise_failure()
        last = self._newest
        if snapshot.version.epoch != self.epoch or (last is not None and snapshot.version <= last.version):
            raise ValueError(
                f"cannot publish {snapshot.version}: this trainer has epoch {self.epoch} and has published "
                f"{last.version if last else 'nothing'} last"
            )
        await self.start()
        self._newest = Published.plan(last.number + 1 if last else 1, snapshot, self.config.bucket_bytes)
        for link in self._links.values():
            link.wake()

    async def wait_delivered(self, version: Version, *, servers: int = 1, timeout_s: float) -> bool:
        """Wait until this many servers serve ``version`` or a later one; false when they do not in time.

        Raises:
            StaleEpochError: another trainer has taken over.
        """

        def reached() -> bool:
            self._raise_failure()
            return sum(served is not None and served >= version for served in self.versions.values()) >= servers

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(reached)
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Stop sending and leave every pair; servers that do not answer are not waited for."""
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [asyncio.create_task(link.close()) for link in self._links.values()]
        self._links.clear()
        self._tasks.clear()
        if pending := {*closing, *self._farewells}:
            await asyncio.wait(pending, timeout=CLOSE_S)
        await self._exit.aclose()
        self._store.clear()

    # --- what links call ----------------------------------------------------------------------------------------------

    async def tell(self, server_id: str, state: MemberState) -> None:
        """Set a server's state in the coordinator.

        Raises:
            StaleEpochError: another trainer has taken over.
            LinkFailedError: the coordinator does not take it (the server has restarted or is unknown).
        """
        try:
            await self._client.set_member_state(server_id, state)
        except FencedError as error:
            # 409 has two reasons, and only one of them concerns the whole trainer.
            self._check_epoch(await self._members_now())
            raise LinkFailedError(f"the coordinator refuses {state.state} of {server_id}: {error}") from error
        except (CoordinatorError, CoordinatorUnavailableError) as error:
            raise LinkFailedError(f"the coordinator does not take {state.state} of {server_id}: {error}") from error

    def delivered(self, server_id: str, entry: dict[str, Any]) -> None:
        """An update of ``server_id`` ended: count, log, and tell those who wait."""
        if entry["ok"]:
            self.skipped += entry["skipped"]
        else:
            logger.warning(
                "version %s.%s did not reach %s: %s", entry["epoch"], entry["step"], server_id, entry["reason"]
            )
        self._log(entry)
        self._spawn(self._notify())

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        revision = -1
        try:
            while True:
                try:
                    reply = await self._client.members(revision, POLL_S)
                except (CoordinatorError, CoordinatorUnavailableError) as error:
                    logger.warning("cannot read the membership, servers known so far are kept: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                self._check_epoch(reply)
                revision = reply.revision
                self._reconcile(reply.members)
                await asyncio.sleep(POLL_PAUSE_S)
        except StaleEpochError as error:
            self._fail(error)

    def _reconcile(self, members: list[Member]) -> None:
        present = {member.server_id: member for member in members}
        for server_id in list(self._links):
            if server_id not in present or present[server_id].boot_id != self._links[server_id].boot_id:
                self._drop(server_id)
        for member in members:
            link = self._links.get(member.server_id)
            if link is None:
                self._add(member)
            elif member.state in {"JOINING", "EVICTED"}:
                link.recheck()

    def _add(self, member: Member) -> None:
        link = ServerLink(self, ServerControl(self._session, member.url), member)
        self._links[member.server_id] = link
        task = asyncio.create_task(link.run(), name=f"publish to {member.server_id}")
        self._tasks[member.server_id] = task
        task.add_done_callback(self._ended)

    def _drop(self, server_id: str) -> None:
        link, task = self._links.pop(server_id), self._tasks.pop(server_id)
        task.cancel()
        self._spawn(link.close())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop for good: publishing on could only do harm, and the trainer must learn of it."""
        if self._failure is not None:
            return
        self._failure = error
        logger.error("publishing has stopped: %s", error)
        for task in [*self._tasks.values(), *([self._watcher] if self._watcher else [])]:
            if task is not asyncio.current_task():
                task.cancel()
        self._spawn(self._notify())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_epoch(self, reply: MembersReply) -> None:
        if reply.epoch > self.epoch:
            raise StaleEpochError(
                f"this trainer has epoch {self.epoch}, and epoch {reply.epoch} has started: another trainer has taken "
                "over, so this one publishes no more weights"
            )

    async def _members_now(self) -> MembersReply:
        try:
            return await self._client.members(-1, 0.0)
        except (CoordinatorError, CoordinatorUnavailableError) as error:
            raise LinkFailedError(f"the coordinator does not say which epoch is current: {error}") from error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
