"""Keeps the processes of a run alive and ends them: start, readiness, restarts with a bound, an orderly stop.

Each role is a process group of its own with a log file. A guardian process ends them all if this process is killed; see
:mod:`.guardian`. What roles leave in their temporary directory (sockets, of killed ones too) goes with the run.

Not a session of its own: Linux schedules each session as a unit (autogroup), and a thread of a session that is busy on
another core then waits for hundreds of milliseconds; weight updates and token streams stood still for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from inflight_runtime.local import guardian, logs

RoleKind = Literal["coordinator", "inference", "actor", "trainer"]
Phase = Literal["waiting", "starting", "ready", "restarting", "stopping", "done", "failed"]
Verdict = Literal["done", "restart", "give_up"]

PROBE_EVERY_S: Final = 0.2
BACKOFF_S: Final = (0.2, 1.0, 2.0, 4.0, 8.0)
PR_SET_CHILD_SUBREAPER: Final = 36


class RoleFailedError(Exception):
    """A role is beyond restarting; the message says why, with the last lines of its log.

    Attributes:
        role: its name.
        reason: how it ended.
        code: what it ended with; ``None`` when it did not end by itself.
    """

    def __init__(self, role: str, reason: str, details: str, code: int | None = None) -> None:
        super().__init__(f"{role}: {reason}\n{details}" if details else f"{role}: {reason}")
        self.role = role
        self.reason = reason
        self.code = code


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to run one role.

    Attributes:
        name: unique, for people and for the log's name.
        kind: which program.
        command: makes the command line; called at each start, so a restarted server can get a fresh port.
        log: standard output and error go here, appended.
        environment: the whole environment of the process.
        ready: probe, true when the role can do its work; ``None``: ready once it runs.
        ready_within_s: deadline of the first ``True``, counted from each start.
        restarts: how often it is started again after it has been ready once.
        startup_restarts: how often before that: what fails twice in a row at its start is not cured by trying on.
        grace_s: time between SIGTERM and SIGKILL.
        completes: it is expected to end by itself; otherwise even exit code 0 is a crash.
        forgiven_after_s: a role that ran this long gets all its restarts back: the bound is on crash loops then, not on
            the length of a run.
    """

    name: str
    kind: RoleKind
    command: Callable[[], Sequence[str]]
    log: Path
    environment: Mapping[str, str]
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_within_s: float = 60.0
    restarts: int = 5
    startup_restarts: int = 1
    grace_s: float = 10.0
    completes: bool = False
    forgiven_after_s: float = 600.0


@dataclass(slots=True)
class RoleStatus:
    """What is shown of a role."""

    name: str
    kind: RoleKind
    phase: Phase = "waiting"
    pid: int | None = None
    restarts: int = 0
    note: str = ""


@dataclass(slots=True)
class _Role:
    spec: RoleSpec
    status: RoleStatus
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    ever_ready: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


async def default_verdict(spec: RoleSpec, code: int) -> Verdict:
    """Judge an exit without asking anybody: 0 ends a role that completes, 2 is a bad configuration, else restart."""
    if code == 0 and spec.completes:
        return "done"
    return "give_up" if code == 2 else "restart"


class Supervisor:
    """Runs roles from one event loop.

    Args:
        judge: asked for each exit that nobody ordered.
        on_event: told in one line of each start, readiness, exit and restart.
        guardian_grace_s: how long roles have after SIGTERM when this process was killed.
    """

    def __init__(
        self,
        judge: Callable[[RoleSpec, int], Awaitable[Verdict]] = default_verdict,
        on_event: Callable[[str], None] = lambda _: None,
        guardian_grace_s: float = guardian.GRACE_S,
    ) -> None:
        self._judge = judge
        self._on_event = on_event
        self._roles: dict[str, _Role] = {}
        self._failure: asyncio.Future[RoleFailedError] = asyncio.get_running_loop().create_future()
        self._hurry = False
        _become_subreaper()
        self._scratch = tempfile.mkdtemp(prefix="inflight-")
        self._guardian_command = [
            *(sys.executable, "-I", "-S", guardian.__file__),
            *(str(guardian_grace_s), self._scratch),
        ]
        self._guardian = self._start_guardian()

    # --- start and watch ----------------------------------------------------------------------------------------------

    def start(self, spec: RoleSpec) -> None:
        """Start a role and keep it running until :meth:`stop`."""
        if spec.name in self._roles:
            raise ValueError(f"role {spec.name!r} is there already")
        role = _Role(spec, RoleStatus(spec.name, spec.kind))
        self._roles[spec.name] = role
        role.task = asyncio.create_task(self._keep(role), name=f"keep-{spec.name}")

    async def wait_ready(self, *names: str) -> None:
        """Wait until all of these are ready.

        Raises:
            RoleFailedError: any role of the run failed meanwhile.
        """
        for name in names:
            await self._unless_failed(self._roles[name].ready)

    async def wait_gone(self, name: str) -> None:
        """Wait until a role has completed.

        Raises:
            RoleFailedError: any role of the run failed meanwhile.
        """
        await self._unless_failed(self._roles[name].gone)

    def status(self) -> list[RoleStatus]:
        """Get all roles in the order of their start."""
        return [role.status for role in self._roles.values()]

    async def _unless_failed(self, event: asyncio.Event) -> None:
        waiting = asyncio.create_task(event.wait())
        either: set[asyncio.Future[Any]] = {waiting, self._failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._failure.done():
            raise self._failure.result()

    async def _keep(self, role: _Role) -> None:
        spec, status = role.spec, role.status
        try:
            while not role.stopping.is_set():
                started = time.monotonic()
                code = await self._run_once(role)
                if role.stopping.is_set():
                    break
                verdict: Verdict = "restart" if code is None else await self._judge(spec, code)
                if role.stopping.is_set() or verdict == "done":
                    break
                reason = self._exit_text(role, code)
                if time.monotonic() - started > spec.forgiven_after_s:
                    status.restarts = 0
                bound = spec.restarts if role.ever_ready else min(spec.startup_restarts, spec.restarts)
                if verdict == "give_up" or code is None or status.restarts >= bound:
                    self._fail(role, reason, code)
                    return
                delay = BACKOFF_S[min(status.restarts, len(BACKOFF_S) - 1)]
                status.restarts += 1
                status.phase, status.note = "restarting", reason
                self._on_event(f"{spec.name}: {reason}; restart {status.restarts} of {bound} in {delay:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await role.stopping.wait()
            status.phase, status.note = "done", ""
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug or a full disk here must end the run, not leave it waiting
            self._fail(role, f"cannot be run: {error!r}")
        finally:
            await self._sweep(role)
            role.gone.set()
            role.ready.set()  # nobody should wait for it any longer; a failure is told by the failure itself

    async def _run_once(self, role: _Role) -> int | None:
        """Start the process and wait for its end; ``None`` when it missed its readiness deadline and was killed."""
        spec, status = role.spec, role.status
        self._spawn(role)
        exited = asyncio.create_task(self._exit_of(role))
        try:
            status.phase = "starting"
            probing = asyncio.create_task(self._until_ready(role))
            await asyncio.wait({exited, probing}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                probing.cancel()
            elif not probing.result():
                status.note = f"not ready within {spec.ready_within_s:g} s"
                await self._sweep(role)
                await exited
                return None
            else:
                self._mark_ready(role)
            return await exited
        finally:
            exited.cancel()
            await self._sweep(role)

    def _spawn(self, role: _Role) -> None:
        spec, status = role.spec, role.status
        command = list(spec.command())
        with spec.log.open("ab") as log:
            role.log_start = log.tell()
            log.write(f"--- {spec.name}: start {status.restarts + 1}, {time.strftime('%F %T')}: ".encode())
            log.write(" ".join(command).encode() + b"\n")
            log.flush()
            role.log_start = log.tell()
            role.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**spec.environment, "TMPDIR": self._scratch},
                process_group=0,
            )
        status.pid = role.process.pid
        self._tell_guardian(f"+{role.process.pid}")
        self._on_event(f"{spec.name}: started (pid {role.process.pid})")

    async def _exit_of(self, role: _Role) -> int:
        process = role.process
        assert process is not None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                return await _wait_pidfd(process)
        return await asyncio.to_thread(process.wait)

    async def _until_ready(self, role: _Role) -> bool:
        probe = role.spec.ready
        if probe is None:
            return True
        end = time.monotonic() + role.spec.ready_within_s
        while time.monotonic() < end:
            if await probe():
                return True
            await asyncio.sleep(PROBE_EVERY_S)
        return False

    def _mark_ready(self, role: _Role) -> None:
        role.ever_ready = True
        role.status.phase, role.status.note = "ready", ""
        role.ready.set()
        if role.spec.ready is not None:
            self._on_event(f"{role.spec.name}: ready")

    def _exit_text(self, role: _Role, code: int | None) -> str:
        if code is None:
            return role.status.note
        when = "" if role.ever_ready else " before it was ready"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}{when}"
        return f"ended with exit code {code}{when}"

    def _fail(self, role: _Role, reason: str, code: int | None = None) -> None:
        role.status.phase, role.status.note = "failed", reason
        if role.status.restarts:
            reason += f" (after {role.status.restarts} restart{'s' if role.status.restarts > 1 else ''})"
        if not self._failure.done():
            details = logs.explain(role.spec.log, role.log_start)
            self._failure.set_result(RoleFailedError(role.spec.name, reason, details, code))

    # --- stop ---------------------------------------------------------------------------------------------------------

    async def stop(self, kind: RoleKind) -> None:
        """End all roles of a kind: SIGTERM to each group, its grace time, SIGKILL for what is left."""
        await asyncio.gather(*(self._stop(role) for role in self._roles.values() if role.spec.kind == kind))

    async def _stop(self, role: _Role) -> None:
        role.stopping.set()
        process = role.process
        if process is not None and process.poll() is None:
            role.status.phase = "stopping"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL if self._hurry else signal.SIGTERM)
            try:
                async with asyncio.timeout(role.spec.grace_s):
                    await role.gone.wait()
            except TimeoutError:
                self._on_event(f"{role.spec.name}: still there {role.spec.grace_s:g} s after SIGTERM; killed")
                await self._sweep(role)
        if role.task is not None:
            await asyncio.wait({role.task})

    def kill_now(self) -> None:
        """SIGKILL every role at once; a :meth:`stop` under way then ends quickly. Safe in a signal handler."""
        self._hurry = True
        for role in self._roles.values():
            role.stopping.set()
            if role.process is not None and role.process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(role.process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """End whatever still runs, at once, and the guardian with it."""
        self.kill_now()
        for role in self._roles.values():
            await self._stop(role)
        assert self._guardian.stdin is not None
        with contextlib.suppress(OSError):
            self._guardian.stdin.close()
        try:
            await asyncio.to_thread(self._guardian.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _sweep(self, role: _Role) -> None:
        """Make sure that nothing of a role's process tree is left, and take it off the guardian's list."""
        process = role.process
        if process is None:
            return
        roots = {process.pid, *self._strays()}
        if guardian.family(roots, guardian.process_table()) and not await asyncio.to_thread(
            guardian.kill_family, roots
        ):
            self._on_event(f"{role.spec.name}: a process of it does not end even on SIGKILL (pid {process.pid})")
        self._reap(roots - {process.pid})
        self._tell_guardian(f"-{process.pid}")
        role.status.pid = None

    def _strays(self) -> set[int]:
        """Orphans of roles, which the kernel has given to us: in a group of their own and started after us."""
        known = {role.process.pid for role in self._roles.values() if role.process} | {self._guardian.pid}
        table = guardian.process_table()
        me = table.get(os.getpid())
        if me is None:
            return set()
        children = (entry for entry in table.values() if entry.parent == me.pid and entry.pid not in known)
        ours = known | {me.group}
        return {entry.pid for entry in children if entry.group not in ours and entry.start >= me.start}

    def _reap(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _start_guardian(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._guardian_command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _tell_guardian(self, line: str) -> None:
        if _write_line(self._guardian, line):
            return
        self._guardian.wait()
        self._guardian = self._start_guardian()
        for role in self._roles.values():
            if role.process is not None and role.process.poll() is None:
                _write_line(self._guardian, f"+{role.process.pid}")


def _write_line(process: subprocess.Popen[bytes], line: str) -> bool:
    assert process.stdin is not None
    try:
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
    except OSError:
        return False
    return True


async def _wait_pidfd(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process without polling it (Linux)."""
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def _become_subreaper() -> None:
    """Ask Linux to give us the orphans among our descendants, so that they can be ended (a rank of a dead torchrun)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
