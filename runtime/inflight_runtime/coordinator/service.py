"""What the coordinator does, without HTTP: ledger, membership and lease terms behind one set of coroutines."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgpack

from inflight_runtime.config.roles import CoordinatorConfig
from inflight_runtime.coordinator import admission
from inflight_runtime.coordinator.admission import Room
from inflight_runtime.coordinator.inspection import inspect
from inflight_runtime.coordinator.leases import LeaseClock
from inflight_runtime.coordinator.ledger import Ledger
from inflight_runtime.coordinator.membership import Membership
from inflight_runtime.coordinator.payloads import SegmentStore
from inflight_runtime.coordinator.rollouts import Grant, Receipt
from inflight_runtime.coordinator.run import RefusedError
from inflight_runtime.coordinator.samples import readable
from inflight_runtime.coordinator.snapshot import Snapshot
from inflight_runtime.coordinator.steps import BatchPlan, Started
from inflight_runtime.coordinator.waiting import Signal
from inflight_runtime.coordinator.writer import Writer
from inflight_runtime.protocol import (
    CheckpointDurable,
    DatasetInfo,
    DropRequest,
    FailRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    MemberBeat,
    MemberReply,
    MembersReply,
    MemberState,
    RenewReply,
    RenewRequest,
    RunState,
    StepCommit,
    SubmitReply,
    TrainerStart,
    TrainerStarted,
    VersionField,
)
from inflight_runtime.types import Version

T = TypeVar("T")
Observe = Callable[[int, float], None]

ACTOR_SEEN_S: Final = 60.0
"""An actor that asked for nothing for this long is not counted any more."""

log = logging.getLogger(__name__)


class Coordinator:
    """One run's coordinator. Lives on one event loop."""

    def __init__(self, config: CoordinatorConfig, ledger: Ledger, payloads: SegmentStore, observe: Observe) -> None:
        """Take over an open ledger.

        Args:
            config: the run's numbers.
            ledger: belongs to the coordinator from now on.
            payloads: the store that the ledger writes to.
            observe: told of each transaction: operations in it, seconds it took.
        """
        self.config = config
        self.snapshot = ledger.snapshot()
        # Microseconds since 1970: larger than any revision an earlier process gave out.
        self.membership = Membership(config.member_ttl_s, time.time_ns() // 1000)
        self._policy = ledger.run.policy
        self._payloads = payloads
        self._observe = observe
        self._clock = LeaseClock(config.lease_ttl_s)
        self._clock.replace(ledger.rollouts.held(), time.monotonic())
        self._actors: dict[str, float] = {}
        self._lease_signal, self._batch_signal, self._members_signal = Signal(), Signal(), Signal()
        self._writer = Writer(ledger, self._committed)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self._writer.alive

    async def close(self) -> None:
        """Let everybody who waits go, finish the transactions under way and close the ledger."""
        for signal in (self._lease_signal, self._batch_signal, self._members_signal):
            signal.close()
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        await self._writer.close()
        self._payloads.close()

    # --- leases and rollouts ------------------------------------------------------------------------------------------

    async def announce(self, info: DatasetInfo) -> None:
        """Note the dataset's size; see :meth:`.Ledger.announce`."""
        self._saw(info.actor_id)
        await self._writer.run(lambda ledger: ledger.announce(info.size, info.eval_size))

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Give out work, waiting for some for at most ``request.wait_seconds``."""
        self._saw(request.actor_id)
        deadline = time.monotonic() + request.wait_seconds
        while True:
            cap, served = self.cap, self.membership.newest_version()
            grant: Grant = await self._writer.run(
                lambda ledger, cap=cap, served=served: ledger.rollouts.lease(  # type: ignore[misc]
                    request.actor_id, request.request_id, request.max_groups, cap, served
                )
            )
            now = time.monotonic()
            if grant.leases or grant.finished:
                return self._hand_out(grant, request.actor_id, now)
            while not self._leasable():
                if not await self._lease_signal.wait(deadline - time.monotonic()):
                    return LeaseReply(reason=grant.reason)

    def _hand_out(self, grant: Grant, actor_id: str, now: float) -> LeaseReply:
        for lease in grant.leases:
            self._clock.hold(lease.group_id, lease.fence, actor_id, now)
        return LeaseReply(
            leases=[
                Lease(
                    group_id=lease.group_id,
                    fence=lease.fence,
                    kind=lease.kind,
                    problem_index=lease.problem_index,
                    attempts=lease.attempts,
                    min_version=_field(lease.min_version),
                    ttl_seconds=self._clock.ttl_s,
                )
                for lease in grant.leases
            ],
            finished=grant.finished,
            reason=grant.reason,
        )

    def renew(self, request: RenewRequest) -> RenewReply:
        """Start the leases' terms anew."""
        now = self._saw(request.actor_id)
        return RenewReply(
            lost=[
                lease
                for lease in request.leases
                if not self._clock.renew(lease.group_id, lease.fence, request.actor_id, now)
            ]
        )

    async def release(self, request: RenewRequest) -> None:
        """Take leases back unfinished."""
        self._saw(request.actor_id)
        await self._take_back([(lease.group_id, lease.fence) for lease in request.leases], expired=False)

    async def _take_back(self, leases: list[tuple[int, int]], *, expired: bool) -> None:
        await self._writer.run(lambda ledger: ledger.rollouts.requeue(leases, expired=expired))
        for lease in leases:
            self._clock.end(*lease)

    async def submit(self, payload: bytes) -> tuple[int, SubmitReply]:
        """Take a finished group; returns the HTTP status with the reply.

        Raises:
            InvalidSampleError: the payload breaks the data model.
            RefusedError: fenced off, or not what was leased.
        """
        submission = inspect(payload)
        receipt = await self._writer.run(lambda ledger: ledger.rollouts.submit(submission))
        self._settle(submission.group_id, submission.fence, receipt)
        return receipt.status, SubmitReply(state=receipt.state, reason=receipt.reason)

    async def drop(self, group_id: int, request: DropRequest) -> None:
        """Give up a group.

        Raises:
            RefusedError: fenced off.
        """
        receipt = await self._writer.run(lambda ledger: ledger.rollouts.drop(group_id, request.fence, request.reason))
        self._settle(group_id, request.fence, receipt)
        log.info("group %d given up: %s %s", group_id, request.reason, request.detail)

    def _settle(self, group_id: int, fence: int, receipt: Receipt) -> None:
        self._clock.end(group_id, fence)
        if receipt.status == 409:
            raise RefusedError(409, f"group {group_id} is not yours any more: {receipt.reason or 'fenced off'}")

    # --- trainer ------------------------------------------------------------------------------------------------------

    async def start_trainer(self, request: TrainerStart) -> TrainerStarted:
        """Begin a new epoch."""
        started: Started = await self._writer.run(lambda ledger: ledger.steps.start_trainer(request.resume_step))
        self._clock.replace(started.held, time.monotonic())
        log.info("trainer started at step %d: epoch %d", request.resume_step, started.epoch)
        return TrainerStarted(epoch=started.epoch, steps=self.config.steps)

    async def batch(self, step: int, epoch: int, wait_seconds: float) -> bytes | None:
        """Get a step's batch as msgpack, waiting for it for at most ``wait_seconds``; ``None``: not ready."""
        deadline = time.monotonic() + wait_seconds
        while True:
            plan = await self._writer.run(lambda ledger: ledger.steps.batch(step, epoch))
            if plan is not None:
                return await asyncio.to_thread(self._pack, plan)
            while not self._batch_may_be_ready(step, epoch):
                if not await self._batch_signal.wait(deadline - time.monotonic()):
                    return None

    def _batch_may_be_ready(self, step: int, epoch: int) -> bool:
        now = self.snapshot
        return (
            now.finished
            or now.epoch != epoch
            or now.count("assigned_step") >= step
            or now.count("completed") >= self._policy.groups_per_step
        )

    def _pack(self, plan: BatchPlan) -> bytes:
        batch = {
            "step": plan.step,
            "policy_step": plan.step - 1,
            "planned_groups": self._policy.groups_per_step,
            "excluded": plan.excluded,
            "groups": [self._payloads.read(ref) for ref in plan.refs],
        }
        return bytes(msgpack.packb(batch, use_bin_type=True))

    async def commit(self, step: int, request: StepCommit) -> None:
        """Mark a step as trained."""
        await self._writer.run(lambda ledger: ledger.steps.commit(step, request.epoch, request.metrics))

    async def checkpoint(self, request: CheckpointDurable) -> None:
        """Note a durable checkpoint and delete the payloads that it makes superfluous."""
        gone = await self._writer.run(
            lambda ledger: ledger.steps.checkpoint(request.epoch, request.step, request.oldest_step)
        )
        if gone:
            await self._writer.run(lambda _: self._payloads.delete(gone))

    # --- membership ---------------------------------------------------------------------------------------------------

    def beat(self, beat: MemberBeat) -> MemberReply:
        """Take a server's heartbeat."""
        reply = self.membership.beat(beat, time.monotonic(), self.snapshot.policy_version)
        self._members_changed()
        return reply

    def leave(self, server_id: str, boot_id: str) -> None:
        """Take a server out."""
        self.membership.leave(server_id, boot_id)
        self._members_changed()

    def set_member_state(self, server_id: str, told: MemberState) -> None:
        """Take the publisher's word on a server."""
        self.membership.set_state(server_id, told, self.snapshot.epoch, time.monotonic())
        self._members_changed()

    async def members(self, revision: int, wait_seconds: float) -> MembersReply:
        """Get the servers, waiting for a change from ``revision`` for at most ``wait_seconds``."""
        deadline = time.monotonic() + wait_seconds
        while self.membership.revision == revision:
            if not await self._members_signal.wait(deadline - time.monotonic()):
                break
        now = self.snapshot
        return MembersReply(
            revision=self.membership.revision,
            epoch=now.epoch,
            policy_version=_field(now.policy_version),
            finished=now.finished,
            members=self.membership.members(time.monotonic()),
        )

    # --- run ----------------------------------------------------------------------------------------------------------

    async def samples(self, step: int | None, limit: int) -> list[dict[str, Any]]:
        """Get attempts as people read them."""
        groups = math.ceil(limit / max(1, self.config.group_size))
        rows = await self._writer.run(lambda ledger: ledger.steps.shown(step, groups))
        return await asyncio.to_thread(readable, rows, self._payloads, limit)

    async def fail(self, request: FailRequest) -> None:
        """End the run as failed."""
        log.error("run failed, says %s: %s", request.source, request.reason)
        await self._writer.run(lambda ledger: ledger.run.fail(f"{request.source}: {request.reason}"))

    @property
    def cap(self) -> int:
        """C: how many groups may be generated at once."""
        if self.config.max_leased_groups is not None:
            return self.config.max_leased_groups
        return admission.server_cap(self.membership.capacities(), self.config.group_size)

    @property
    def room(self) -> Room:
        """What may be leased now."""
        return admission.room(self._policy, self.snapshot.load, self.cap)

    def state(self) -> RunState:
        """Get everything that is shown of the run."""
        now, monotonic = self.snapshot, time.monotonic()
        load = now.load
        begun = float(now.facts.get("started_at") or time.time())
        ended = float(now.facts.get("finished_at") or time.time())
        return RunState(
            job=self.config.job,
            outcome=now.outcome,
            reason=now.reason,
            epoch=now.epoch,
            step=now.trained_step,
            steps=self.config.steps,
            policy_version=_field(now.policy_version),
            groups=now.states,
            dropped=now.dropped,
            attempts_failed=now.count("attempts_failed"),
            duplicates=now.count("duplicates"),
            fenced=now.count("fenced"),
            leases_expired=now.count("leases_expired"),
            capacity={
                "outstanding": load.outstanding,
                "bound": self._policy.bound,
                "leased": load.held,
                "cap": self.cap,
            },
            metrics=now.record("metrics"),
            evaluation=now.record("evaluation"),
            checkpoint_step=now.counts.get("checkpoint_step"),
            trainer_starts=now.count("trainer_starts"),
            steps_skipped=now.count("steps_skipped"),
            actors=sum(monotonic - seen < ACTOR_SEEN_S for seen in self._actors.values()),
            members=self.membership.members(monotonic),
            seconds=round(ended - begun, 3),
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _committed(self, snapshot: Snapshot, operations: int, seconds: float) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self._observe(operations, seconds)
        if (before.epoch, before.outcome) != (snapshot.epoch, snapshot.outcome):
            self.membership.touch()
            self._members_signal.wake()
        self._batch_signal.wake()
        if self._lease_signal.waited_for and self._leasable():
            self._lease_signal.wake()

    def _members_changed(self) -> None:
        self._members_signal.wake()
        if self._lease_signal.waited_for and self._leasable():
            self._lease_signal.wake()

    def _leasable(self) -> bool:
        """Whether a lease request may get something (or the news that the run is over)."""
        now = self.snapshot
        if now.finished:
            return True
        if not now.facts.get("dataset"):
            return False
        if now.count("evaluation_pending") and (now.count("evaluation_open") or not now.count("evaluation_made")):
            served = self.membership.newest_version()
            if served is not None and served >= Version(now.epoch, now.count("evaluation_step")):
                return True
        room = self.room
        return bool(room.requeued or room.new)

    def _saw(self, actor_id: str) -> float:
        now = time.monotonic()
        self._actors[actor_id] = now
        return now

    async def _sweep(self) -> None:
        """Take back leases whose term is over and evict silent servers."""
        period = min(1.0, self.config.lease_ttl_s / 4, self.config.member_ttl_s / 4)
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            for server in self.membership.expire(now):
                log.warning("server %s evicted: heartbeat lost", server)
                self._members_changed()
            self._actors = {name: seen for name, seen in self._actors.items() if now - seen < ACTOR_SEEN_S}
            overdue = self._clock.overdue(now)
            if overdue:
                log.warning("%d leases expired, the first is of group %d", len(overdue), overdue[0][0])
                try:
                    await self._take_back(overdue, expired=True)
                except Exception:
                    log.exception("expired leases could not be taken back; the next sweep tries again")


def _field(version: Version) -> VersionField:
    return VersionField(epoch=version.epoch, step=version.step)
