"""Runs a job on this machine: starts the roles in order, watches them, and ends them in order, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from inflight_runtime.coordinator.client import CoordinatorClient, CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.local.launch import Launcher, trainer_grace_s
from inflight_runtime.local.machine import Prepared
from inflight_runtime.local.result import Outcome, RunResult
from inflight_runtime.local.snapshot import Snapshot, Tracker
from inflight_runtime.local.supervisor import RoleFailedError, RoleSpec, Supervisor, Verdict
from inflight_runtime.local.view import View
from inflight_runtime.protocol import RunState

POLL_S: Final = 0.5
STATE_TIMEOUT_S: Final = 2.0
LAST_WORD_S: Final = 10.0
"""How long a coordinator that is away is waited for when an exit has to be judged."""
EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
"""Of a role, and then of the run: what it was given cannot be used, and no restart mends that."""
STOP_ORDER: Final = ("actor", "trainer", "inference", "coordinator")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class _End:
    """Why the work stops, before everything is stopped in order."""

    outcome: Outcome
    exit_code: int
    reason: str


class _Unbreakable:
    """A view whose terminal or pipe may go away without taking the run with it."""

    def __init__(self, view: View) -> None:
        self._view = view

    def event(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._view.event(text)

    def show(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(OSError):
            self._view.show(snapshot)


class Executor:
    """One run of one job.

    Args:
        prepared: the run.
        view: shows it.
        ready_within_s: deadline of an inference server's readiness.
    """

    def __init__(self, prepared: Prepared, view: View, ready_within_s: float) -> None:
        self._prepared = prepared
        self._view = _Unbreakable(view)
        self._ready_within_s = ready_within_s
        self._tracker = Tracker(prepared.job.name)
        address = prepared.rendered.coordinator
        self._client = CoordinatorClient(
            f"http://{address.host}:{address.port}",
            prepared.directory.token(),
            timeout_s=STATE_TIMEOUT_S,
            retry_for_s=0,
        )

    async def run(self) -> RunResult:
        """Run to the end and leave no process behind."""
        began = time.monotonic()
        # Were this process killed, the trainer would still have the time for its checkpoint.
        supervisor = Supervisor(self._judge, self._view.event, trainer_grace_s(self._prepared.job))
        ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        async with aiohttp.ClientSession() as session, self._client:
            with self._signals(supervisor, ended):
                end = await self._run(supervisor, session, ended)
        self._tracker.phase = end.outcome
        roles = supervisor.status()
        self._view.show(self._tracker.snapshot(roles))
        restarts = {role.name: role.restarts for role in roles if role.restarts}
        seconds = time.monotonic() - began
        return RunResult(end.outcome, end.exit_code, end.reason, self._tracker.state, restarts, seconds)

    async def _run(self, supervisor: Supervisor, session: aiohttp.ClientSession, ended: asyncio.Future[_End]) -> _End:
        watcher = asyncio.create_task(self._watch(supervisor, ended))
        try:
            end = await self._until_ended(supervisor, session, ended)
            await self._ask(STATE_TIMEOUT_S)  # the last numbers, while somebody can tell them
            self._tracker.phase = "stopping"
            for kind in STOP_ORDER:
                await supervisor.stop(kind)
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
            await supervisor.aclose()
        return end

    async def _until_ended(
        self, supervisor: Supervisor, session: aiohttp.ClientSession, ended: asyncio.Future[_End]
    ) -> _End:
        """Do the work until it is done, somebody stops it, or it cannot go on."""
        working = asyncio.create_task(self._work(supervisor, session))
        either: set[asyncio.Future[Any]] = {working, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            working.result()
        except RoleFailedError as error:
            return _End("failed", EXIT_BAD_INPUT if error.code == EXIT_BAD_INPUT else EXIT_FAILED, str(error))
        finally:
            working.cancel()
            await asyncio.wait({working})
        # The trainer is through; a run that was declared failed in the same moment has not succeeded.
        state = await self._ask(STATE_TIMEOUT_S) or self._tracker.state
        if state is not None and state.outcome == "failed":
            return _End("failed", EXIT_FAILED, state.reason)
        return _End("succeeded", 0, "")

    async def _work(self, supervisor: Supervisor, session: aiohttp.ClientSession) -> None:
        """Start everything and wait for the trainer's end."""
        launcher = Launcher(self._prepared, session, self._ready_within_s)
        supervisor.start(launcher.coordinator())
        await supervisor.wait_ready("coordinator")
        # All at once: each of them waits for what it needs by itself.
        others = [*launcher.inference(), launcher.trainer(), *launcher.actors()]
        for spec in others:
            supervisor.start(spec)
        await supervisor.wait_ready(*(spec.name for spec in others))
        self._tracker.phase = "training"
        await supervisor.wait_gone("trainer")

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _watch(self, supervisor: Supervisor, ended: asyncio.Future[_End]) -> None:
        """Keep the view going, and end a run that failed or ran out of time."""
        deadline_s = self._prepared.job.spec.lifecycle.active_deadline_seconds
        began = time.monotonic()
        while True:
            state = await self._ask(STATE_TIMEOUT_S)
            self._view.show(self._tracker.snapshot(supervisor.status()))
            if state is not None and state.outcome == "failed" and not ended.done():
                ended.set_result(_End("failed", EXIT_FAILED, state.reason or "no reason was given"))
            if deadline_s is not None and time.monotonic() - began > deadline_s and not ended.done():
                reason = f"spec.lifecycle.activeDeadlineSeconds: {deadline_s} s are over; raise it to train longer"
                ended.set_result(_End("failed", EXIT_FAILED, reason))
            await asyncio.sleep(POLL_S)

    async def _ask(self, within_s: float) -> RunState | None:
        """Get the coordinator's state; ``None`` when it does not answer in time."""
        try:
            # Not wait_for: in Python 3.11 it can swallow a cancellation that comes together with the answer.
            async with asyncio.timeout(within_s):
                state = await self._client.state()
        except (CoordinatorError, CoordinatorUnavailableError, TimeoutError):
            return None
        self._tracker.answered(state)
        return state

    async def _judge(self, spec: RoleSpec, code: int) -> Verdict:
        """Judge an exit that nobody ordered."""
        if spec.kind == "coordinator":
            return "give_up" if code == EXIT_BAD_INPUT else "restart"
        give_up_at = time.monotonic() + LAST_WORD_S
        state = await self._ask(STATE_TIMEOUT_S)
        while state is None and time.monotonic() < give_up_at:
            await asyncio.sleep(POLL_S)
            state = await self._ask(STATE_TIMEOUT_S)
        if state is not None and state.outcome == "failed":
            return "done"  # the watcher ends the run, with the reason
        if code == EXIT_BAD_INPUT:
            return "give_up"
        if code == 0 and spec.completes:
            # Somebody may have stopped it from outside, in which case the work is not done.
            through = state is None or state.outcome == "succeeded" or state.step >= state.steps
            return "done" if through else "restart"
        return "restart"

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, supervisor: Supervisor, ended: asyncio.Future[_End]) -> Iterator[None]:
        """The first Ctrl-C, SIGTERM or SIGHUP ends the run in order, the second at once."""
        loop = asyncio.get_running_loop()
        count = 0

        def interrupted(signum: signal.Signals) -> None:
            nonlocal count
            count += 1
            if count > 1:
                self._view.event("killing everything")
                supervisor.kill_now()
                return
            self._tracker.phase = "stopping"
            self._view.event(f"{signum.name}: stopping in order, with a checkpoint; once more kills at once")
            if not ended.done():
                ended.set_result(_End("interrupted", 128 + signum, f"stopped by {signum.name}"))

        for signum in SIGNALS:
            loop.add_signal_handler(signum, interrupted, signum)
        try:
            yield
        finally:
            for signum in SIGNALS:
                loop.remove_signal_handler(signum)
