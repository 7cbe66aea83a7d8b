"""The trainer's conversation with the coordinator and the servers, off the computing thread.

Everything here is handed to a background event loop. Batches are fetched one step ahead, commits and weight updates are
sent while the next step is computed; what went wrong in the background is raised at the next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.coordinator.client import CoordinatorError, CoordinatorUnavailableError, StepBatch
from inflight_runtime.protocol import (
    CheckpointDurable,
    FailRequest,
    MembersReply,
    RunState,
    StepCommit,
    TrainerStart,
    TrainerStarted,
)
from inflight_runtime.types import Version

if TYPE_CHECKING:
    from inflight_runtime.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALL_DEADLINE_S: Final = 180.0
"""Longer than the client's own retries, which are what normally gives up."""
LEAVE_S: Final = 10.0
"""For the commit before, once the trainer is to stop: the next one's start commits what is in its checkpoint."""
CLOSE_S: Final = 10.0
"""For leaving the servers at the end."""
POLL_S: Final = 5.0
"""Length of one long poll for a batch."""
WAKE_S: Final = 0.2
"""How soon a waiting trainer notices a signal."""
REPORT_S: Final = 60.0
"""A trainer that waits says why, this often."""
BATCH_DEADLINE_S: Final = 3600.0
"""Without a batch for this long the trainer gives up."""


class NoBatchError(RuntimeError):
    """No batch came for :data:`BATCH_DEADLINE_S`; the message has the coordinator's reason."""


class Coordinator(Protocol):
    """What the trainer asks of :class:`~inflight_runtime.coordinator.client.CoordinatorClient`."""

    async def start_trainer(self, request: TrainerStart) -> TrainerStarted:
        """Begin an epoch."""

    async def batch(self, step: int, epoch: int, wait_seconds: float) -> StepBatch | None:
        """Long-poll for a step's groups."""

    async def commit(self, step: int, request: StepCommit) -> None:
        """Report a step as trained."""

    async def checkpoint(self, request: CheckpointDurable) -> None:
        """Report a checkpoint as durable."""

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        """Get the membership."""

    async def state(self) -> RunState:
        """Get the run's state."""

    async def fail(self, request: FailRequest) -> None:
        """End the run as failed."""


class WeightPublisher(Protocol):
    """What the trainer asks of :class:`~inflight_runtime.weights.publisher.Publisher`."""

    async def publish(self, snapshot: Snapshot) -> None:
        """Make a snapshot what every server should serve."""

    async def aclose(self) -> None:
        """Stop sending."""


class Remote:
    """Blocking and background calls for the computing thread. Not thread-safe: it belongs to that one thread."""

    def __init__(self, background: BackgroundLoop, client: Coordinator) -> None:
        self._background = background
        self._client = client
        self._publisher: WeightPublisher | None = None
        self._batches: dict[int, Future[StepBatch]] = {}
        self._pending: list[Future[None]] = []
        self.epoch = 0

    # --- blocking -----------------------------------------------------------------------------------------------------

    def start(self, resume_step: int) -> TrainerStarted:
        """Begin this trainer's epoch.

        Raises:
            CoordinatorError: the coordinator has no way to go on from that step.
        """
        started = self._run(self._client.start_trainer(TrainerStart(resume_step=resume_step)))
        self.epoch = started.epoch
        return started

    def set_publisher(self, make: Callable[[], WeightPublisher]) -> None:
        """Make the publisher, on the loop that it will live on."""

        async def construct() -> WeightPublisher:
            return make()

        self._publisher = self._run(construct())

    def wait_for_batch(self, step: int, stopping: Callable[[], bool]) -> StepBatch | None:
        """Wait for a step's batch; ``None`` when ``stopping`` says so first.

        Raises:
            NoBatchError: none came within an hour.
            FencedError: another trainer has taken over.
            CoordinatorError: the run has failed.
        """
        self.prefetch(step)
        future = self._batches[step]
        began = time.monotonic()
        reported = began
        while not stopping():
            try:
                batch = future.result(WAKE_S)
            except TimeoutError:
                if future.done():
                    raise
                now = time.monotonic()
                if now - reported >= REPORT_S:
                    reported = now
                    logger.info("waiting for the batch of step %d since %.0f s: %s", step, now - began, self._reason())
                if now - began >= BATCH_DEADLINE_S:
                    raise NoBatchError(
                        f"no batch for step {step} within {BATCH_DEADLINE_S:g} s: {self._reason()}"
                    ) from None
                continue
            del self._batches[step]
            return batch
        return None

    def settle(self, timeout_s: float = CALL_DEADLINE_S) -> None:
        """Wait until what was sent in the background has arrived.

        Raises:
            FencedError, StaleEpochError: another trainer has taken over.
            CoordinatorError, CoordinatorUnavailableError, TimeoutError: it did not arrive.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result(timeout_s)

    def durable(self, step: int, oldest_step: int, path: str, timeout_s: float = CALL_DEADLINE_S) -> None:
        """Report a checkpoint as durable."""
        request = CheckpointDurable(epoch=self.epoch, step=step, oldest_step=oldest_step, path=path)
        self._run(self._client.checkpoint(request), timeout_s)

    def fail(self, reason: str) -> None:
        """End the run as failed; no more than a line in the log when even that does not work."""
        try:
            self._run(self._client.fail(FailRequest(source="trainer", reason=reason)), 10.0)
        except (CoordinatorError, CoordinatorUnavailableError, TimeoutError) as error:
            logger.warning("the coordinator could not be told of the failure: %s", error)

    def wait_for_servers(self, version: Version, timeout_s: float) -> bool:
        """Wait until no server in use is behind ``version``; false when one still is in the end."""
        give_up = time.monotonic() + timeout_s
        while True:
            members = self._run(self._client.members()).members
            behind = [
                member.server_id
                for member in members
                if member.state in {"READY", "UPDATING"}
                and (member.version is None or Version(member.version.epoch, member.version.step) < version)
            ]
            if not behind:
                return True
            if time.monotonic() >= give_up:
                logger.warning("version %s did not reach %s within %g s", version, ", ".join(behind), timeout_s)
                return False
            time.sleep(WAKE_S)

    def close(self) -> None:
        """Stop publishing and forget what is still on its way."""
        for future in self._batches.values():
            future.cancel()
        self._batches.clear()
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            try:
                self._run(publisher.aclose(), CLOSE_S)
            except TimeoutError:
                logger.warning("the publisher did not close within %g s", CLOSE_S)

    # --- in the background --------------------------------------------------------------------------------------------

    def prefetch(self, step: int) -> None:
        """Begin to fetch a step's batch."""
        if step not in self._batches:
            self._batches[step] = self._background.submit(self._fetch(step, self.epoch))

    def publish(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to the publisher."""
        if self._publisher is None:
            raise RuntimeError("publish() before set_publisher()")
        self._pending.append(self._background.submit(self._publisher.publish(snapshot)))

    def commit(self, step: int, metrics: dict[str, float], stopping: Callable[[], bool]) -> None:
        """Report a step as trained. At most one report is on its way: the one before is waited for.

        Without a coordinator that would take the time for a last checkpoint: once ``stopping`` says so, it is left.
        """
        if not self._settled_unless(stopping):
            logger.warning("the commit of step %d is left to the next start: the coordinator does not answer", step)
            return
        request = StepCommit(epoch=self.epoch, metrics=metrics)
        self._pending.append(self._background.submit(self._client.commit(step, request)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _settled_unless(self, stopping: Callable[[], bool]) -> bool:
        give_up = time.monotonic() + CALL_DEADLINE_S
        leaving = False
        while any(not future.done() for future in self._pending):
            wait(self._pending, WAKE_S)
            if not leaving and stopping():
                leaving, give_up = True, min(give_up, time.monotonic() + LEAVE_S)
            if time.monotonic() >= give_up:
                break
        if leaving and any(not future.done() for future in self._pending):
            return False
        self.settle(0.0)
        return True

    async def _fetch(self, step: int, epoch: int) -> StepBatch:
        while True:
            batch = await self._client.batch(step, epoch, POLL_S)
            if batch is not None:
                return batch

    def _reason(self) -> str:
        try:
            state = self._run(self._client.state(), 10.0)
        except (CoordinatorError, CoordinatorUnavailableError, TimeoutError) as error:
            return f"the coordinator does not say why ({error})"
        ready = sum(member.state in {"READY", "UPDATING"} for member in state.members)
        return (
            f"{state.reason or state.outcome}; {state.actors} actors, {ready} of {len(state.members)} servers ready, "
            f"groups {state.groups}"
        )

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_DEADLINE_S) -> T:
        return self._background.run(coroutine, timeout_s)
