"""The actor's life: lease, play, hand in, until the run is over or the process is told to go."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Any, Final, Protocol

from inflight_runtime.actor.blocking import BlockingPool
from inflight_runtime.actor.environments import Environment, PromptTooLongError, dataset_sizes
from inflight_runtime.actor.metrics import ActorMetrics, serve_health
from inflight_runtime.actor.rollout import GroupPlayer
from inflight_runtime.actor.router import MembersSource, Router
from inflight_runtime.actor.tokenizer import TextCodec
from inflight_runtime.config.roles import ActorConfig
from inflight_runtime.coordinator.client import CoordinatorError, CoordinatorUnavailableError, FencedError
from inflight_runtime.protocol import (
    DatasetInfo,
    DropRequest,
    FailRequest,
    Lease,
    LeaseRef,
    LeaseReply,
    LeaseRequest,
    RenewReply,
    RenewRequest,
    SubmitReply,
)
from inflight_runtime.types import Group

log = logging.getLogger(__name__)

LEASE_WAIT_S: Final = 5.0
LINGER_S: Final = 0.02
"""How long freed places are gathered before the next lease request, unless a quarter of all is free."""
RELEASE_DEADLINE_S: Final = 3.0
EMPTY_PAUSE_S: Final = 0.05
"""Pause after a reply without leases that came back early."""
SUCCEEDED: Final = 0
FAILED: Final = 1
TERMINATED: Final = 143


class Coordinator(MembersSource, Protocol):
    """What the actor asks of the coordinator (``coordinator.client.CoordinatorClient``)."""

    async def announce_dataset(self, info: DatasetInfo) -> None:
        """Say how many problems there are."""

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for groups."""

    async def renew(self, request: RenewRequest) -> RenewReply:
        """Keep leases alive."""

    async def release(self, request: RenewRequest) -> None:
        """Hand groups back unfinished."""

    async def submit(self, group: Group) -> SubmitReply:
        """Hand in a finished group."""

    async def drop(self, group_id: int, request: DropRequest) -> None:
        """Give up a group."""

    async def fail(self, request: FailRequest) -> None:
        """End the run as failed."""


class _RunFailedError(Exception):
    """The run cannot go on; it has been reported to the coordinator."""


@dataclass(slots=True, eq=False)
class _Work:
    lease: Lease
    task: asyncio.Task[None]


class Actor:
    """One actor process on one event loop."""

    def __init__(
        self,
        config: ActorConfig,
        environment: Environment,
        codec: TextCodec,
        *,
        coordinator: Coordinator,
        token: str,
        stop: asyncio.Event,
    ) -> None:
        """Make an actor.

        Args:
            config: the rendered config.
            environment: what it plays.
            codec: the model's tokenizer and chat template.
            coordinator: its client.
            token: the job's bearer token, for the inference servers.
            stop: set from outside to have the leases handed back and the actor end (SIGTERM).
        """
        self._config = config
        self._environment = environment
        self._coordinator = coordinator
        self.metrics = ActorMetrics()
        self._pool = BlockingPool()
        self.router = Router(
            coordinator,
            token,
            self.metrics,
            timeout_s=config.request_timeout_s,
            retries=config.request_retries,
            wait_for_server_s=config.request_timeout_s,
            seed=config.seed,
        )
        self._player = GroupPlayer(
            config=config,
            environment=environment,
            codec=codec,
            generator=self.router,
            pool=self._pool,
            metrics=self.metrics,
        )
        self._work: dict[int, _Work] = {}
        self._place_free = asyncio.Event()
        self._stop = stop
        self._leased = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._consecutive_failures = 0
        self._announced = False

    async def run(self) -> int:
        """Work until the run is over; returns the process's exit code.

        0: the run is over. 143: told to stop. 1: the coordinator is gone for good, or the environment failed the run
        (the reason is logged and, where it is the environment's, told to the coordinator).
        """
        health = None
        if self._config.health_port:
            health = await serve_health(self._config.host, self._config.health_port, self.metrics, self._why_not_ready)
        helpers: list[asyncio.Task[Any]] = []
        try:
            await self.router.start()
            main = asyncio.create_task(self._lease_loop(), name="leases")
            helpers = [main, asyncio.create_task(self._renew_loop(), name="renewal")]
            events = [asyncio.create_task(event.wait()) for event in (self._stop, self._failed)]
            helpers += events
            done, _ = await asyncio.wait(helpers, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            if self._stop.is_set():
                log.info("told to stop: handing back %d leases", len(self._work))
                return TERMINATED
            for task in done:
                task.result()
            return SUCCEEDED
        except _RunFailedError as error:
            log.error("%s", error)
            return FAILED
        except (CoordinatorUnavailableError, CoordinatorError) as error:
            log.error("cannot go on without the coordinator: %s", error)
            return FAILED
        finally:
            for helper in helpers:
                helper.cancel()
            await self._give_up_work()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self.router.close()
            self._pool.close()
            if health is not None:
                await health.cleanup()

    def _why_not_ready(self) -> str:
        return "" if self._announced else "the coordinator has not been reached yet"

    # --- leases -------------------------------------------------------------------------------------------------------

    async def _lease_loop(self) -> None:
        size, eval_size = dataset_sizes(self._environment)
        await self._coordinator.announce_dataset(
            DatasetInfo(actor_id=self._config.actor_id, size=size, eval_size=eval_size)
        )
        self._announced = True
        while True:
            await self._wait_for_places()
            reply = await self._coordinator.lease(
                LeaseRequest(
                    actor_id=self._config.actor_id,
                    request_id=uuid.uuid4().hex,
                    max_groups=self._config.concurrency - len(self._work),
                    wait_seconds=LEASE_WAIT_S,
                )
            )
            if reply.finished:
                log.info("the run is over")
                return
            for lease in reply.leases:
                self._begin(lease)
            if not reply.leases:
                await asyncio.sleep(EMPTY_PAUSE_S)

    async def _wait_for_places(self) -> None:
        """Wait until it is worth asking: a quarter of the places is free, or one has been free for a moment."""
        enough = max(1, self._config.concurrency // 4)
        while True:
            free = self._config.concurrency - len(self._work)
            if free >= enough:
                return
            self._place_free.clear()
            if free == 0:
                await self._place_free.wait()
                continue
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._place_free.wait()
            except TimeoutError:
                return

    def _begin(self, lease: Lease) -> None:
        if (older := self._work.get(lease.group_id)) is not None:
            older.task.cancel()  # we had lost it and have been given it anew, under the next fence
        self._leased.set()
        task = asyncio.create_task(self._play(lease), name=f"group {lease.group_id}")
        work = self._work[lease.group_id] = _Work(lease, task)
        self.metrics.groups_active.set(len(self._work))

        def ended(task: asyncio.Task[None]) -> None:
            if self._work.get(lease.group_id) is work:
                del self._work[lease.group_id]
            self.metrics.groups_active.set(len(self._work))
            if not task.cancelled() and task.exception() is not None:
                self._fail_with(task.exception())
            self._place_free.set()

        task.add_done_callback(ended)

    async def _renew_loop(self) -> None:
        """Heartbeat of all leases in one request, at a third of their time to live."""
        await self._leased.wait()
        ttl = 60.0
        while True:
            ttl = min((work.lease.ttl_seconds for work in self._work.values()), default=ttl)
            await asyncio.sleep(max(ttl / 3, 0.05))
            if not self._work:
                continue
            refs = [LeaseRef(group_id=work.lease.group_id, fence=work.lease.fence) for work in self._work.values()]
            reply = await self._coordinator.renew(RenewRequest(actor_id=self._config.actor_id, leases=refs))
            for ref in reply.lost:
                work = self._work.get(ref.group_id)
                if work is not None and work.lease.fence == ref.fence and not work.task.done():
                    log.warning("group %d: the lease is lost, giving it up", ref.group_id)
                    self.metrics.leases_lost.inc()
                    work.task.cancel()

    async def _give_up_work(self) -> None:
        """Stop everything in progress and hand the leases back, within a few seconds."""
        works = list(self._work.values())
        for work in works:
            work.task.cancel()
        if not works:
            return
        refs = [LeaseRef(group_id=work.lease.group_id, fence=work.lease.fence) for work in works]
        await asyncio.wait([work.task for work in works], timeout=RELEASE_DEADLINE_S)
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self._coordinator.release(RenewRequest(actor_id=self._config.actor_id, leases=refs))
        except (TimeoutError, CoordinatorError, CoordinatorUnavailableError) as error:
            log.warning("could not hand back %d leases, they will expire: %s", len(refs), error or "no answer in time")

    # --- one group ----------------------------------------------------------------------------------------------------

    async def _play(self, lease: Lease) -> None:
        started = asyncio.get_running_loop().time()
        try:
            try:
                group = await self._player.play(lease)
            except PromptTooLongError as error:
                await self._drop_overlong(lease, error)
                return
            self.metrics.rollout_seconds.observe(asyncio.get_running_loop().time() - started)
            self.metrics.hung_threads.set(self._pool.hung)
            reply = await self._coordinator.submit(group)
            self.metrics.groups.labels(reply.state).inc()
        except FencedError as error:
            log.warning("group %d: fenced off: %s", lease.group_id, error.message)
            self.metrics.leases_lost.inc()
            return
        await self._count_failures(lease, group)

    async def _drop_overlong(self, lease: Lease, error: PromptTooLongError) -> None:
        detail = f"problem {lease.problem_index}: {error}"
        if self._config.environment.overlong_prompt == "fail":
            await self._fail_run(
                f"{detail}. Shorten the problem, raise the model's maximal length, or set overlongPrompt: skip"
            )
        self.metrics.groups.labels("dropped").inc()
        await self._coordinator.drop(
            lease.group_id, DropRequest(fence=lease.fence, reason="prompt_too_long", detail=detail)
        )

    async def _count_failures(self, lease: Lease, group: Group) -> None:
        if group.survivors:
            self._consecutive_failures = 0
            return
        self._consecutive_failures += 1
        error = group.attempts[-1].error
        log.warning("group %d (problem %d): every attempt failed: %s", lease.group_id, lease.problem_index, error)
        limit = self._config.environment.max_consecutive_failures
        if self._consecutive_failures >= limit:
            await self._fail_run(
                f"environment {self._config.environment.entrypoint}: every attempt of {self._consecutive_failures} "
                f"groups in a row failed, the last with {error}"
            )

    def _fail_with(self, error: BaseException | None) -> None:
        self._failure = error
        self._failed.set()

    async def _fail_run(self, reason: str) -> None:
        if self._failure is not None:
            return  # the first reason counts
        # Noted first: the coordinator's "finished" must not pass for a success of ours.
        self._failure = _RunFailedError(reason)
        await self._coordinator.fail(FailRequest(source=self._config.actor_id, reason=reason))
        raise self._failure
