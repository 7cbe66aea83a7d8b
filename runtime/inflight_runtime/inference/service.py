"""The engine-independent half of the inference contract: which update is accepted, when it is committed, what is shown.

A server brings a :class:`WeightPort`, the few things that only its engine can do; :class:`UpdateService` does the rest.
One update at a time: receive and verify while the engine generates, then pause -> commit -> set version -> resume.
Wrong weights are never served under a right version: the engine is resumed only when weights and label agree, else
the server is *broken* for good and says so.

No web framework in here: the vLLM plugin (FastAPI) and the reference server (aiohttp) both use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from inflight_runtime.config.roles import InferenceConfig
from inflight_runtime.protocol import (
    DestroyGroupRequest,
    InitGroupRequest,
    MemberBeat,
    MemberReply,
    ServerStatus,
    ServerVersion,
    VersionField,
    WeightUpdateReply,
    WeightUpdateRequest,
)
from inflight_runtime.types import Version

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING_UPDATES: Final = 8
"""Weight-group requests waiting for their turn; one more is told to come back (503)."""


class ContractError(Exception):
    """A request that is refused or failed; the HTTP layer answers ``status`` with ``ErrorReply(error=message)``.

    400 a request that can never work, 401 no token, 409 superseded or not joined, 502 the transfer failed, 503 the
    server cannot serve (broken, no version yet, busy), 504 the deadline passed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class WeightPort(Protocol):
    """What an engine must be able to do to take weights in flight.

    All calls come from one event loop, never two at once, except that ``leave`` may interrupt a ``receive``.
    """

    async def join(self, request: InitGroupRequest) -> None:
        """Join the pair as rank 1 (workers of a tensor-parallel server: 1 + rank)."""

    async def leave(self, tag: str) -> None:
        """Leave the group ``tag`` and free what was received over it; a no-op when it is not there."""

    async def check(self, request: WeightUpdateRequest) -> None:
        """Compare the announced tensors with what the model needs, before a byte is sent.

        Raises:
            ContractError: 400, naming the unknown or missing parameters.
        """

    async def receive(self, request: WeightUpdateRequest) -> Any:
        """Receive into scratch memory and verify every digest while the engine generates; return a handle.

        Cancelling it must leave nothing behind but, at most, a thread that ends with its group.

        Raises:
            Exception: the transfer failed; the weights in service are untouched.
        """

    async def pause(self) -> None:
        """Stop between two engine steps; running requests keep their place (and their KV cache, if so configured)."""

    async def commit(self, staged: Any) -> None:
        """Put the received weights in place. An exception means that the weights may be mixed."""

    async def set_version(self, version: Version) -> None:
        """Label every token sampled from now on."""

    async def resume(self) -> None:
        """Go on generating."""

    async def abort_all(self, reason: str) -> None:
        """The server is broken: end every running and waiting request so that its client retries elsewhere."""


@runtime_checkable
class AtomicPort(WeightPort, Protocol):
    """A port that may pause, commit, label and resume in one go."""

    def atomic(self, staged: Any) -> bool:
        """Whether these weights can be put in place by :meth:`install`; else the four steps are taken one by one."""

    async def install(self, staged: Any, version: Version) -> float:
        """Put weights and label in place; milliseconds of the commit alone.

        Raises:
            Exception: weights or label may be wrong; the engine must not sample any more.
        """


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences in the engine right now."""

    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Served:
    version: Version
    digest: str
    reply: WeightUpdateReply


class UpdateService:
    """Serialises joins and updates, keeps version, boot id and health of one server.

    Args:
        config: the server's role config.
        port: the engine's half.
        engine: name shown in the status (``vllm``, ``reference``).
        load: cheap count of running and waiting sequences.
        boot_id: random per process unless given.
    """

    def __init__(
        self,
        config: InferenceConfig,
        port: WeightPort,
        *,
        engine: str,
        load: Callable[[], Load] = Load,
        boot_id: str | None = None,
    ) -> None:
        self.boot_id = boot_id or secrets.token_hex(8)
        self._config = config
        self._port = port
        self._engine = engine
        self._load = load
        self._epoch = 0
        self._served: _Served | None = None
        self._broken = ""
        self._updates = 0
        self._groups: dict[str, InitGroupRequest] = {}
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._receiving: tuple[str, asyncio.Task[Any]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- what is served -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version in service; ``None`` before the first commit."""
        return self._served.version if self._served else None

    @property
    def broken(self) -> str:
        """Why the server cannot serve right weights any more; empty while it can."""
        return self._broken

    def admit(self) -> Version:
        """Version under which a request is admitted (its prefix-cache salt); call it for each ``generate``.

        Raises:
            ContractError: 503, the server is broken or has no version yet (no sample without provenance).
        """
        if self._broken:
            raise ContractError(503, self._broken_message())
        if self._served is None:
            raise ContractError(
                503,
                f"server {self._config.server_id} has no weight version yet: it generates once the trainer has sent "
                "the first weights; retry elsewhere or later",
            )
        return self._served.version

    def why_not_ready(self) -> str:
        """Why no request would be admitted now; empty when one would."""
        try:
            self.admit()
        except ContractError as error:
            return error.message
        return ""

    @property
    def salt(self) -> str:
        """Prefix-cache salt of a request admitted now: cached KV never crosses weight versions."""
        return str(self.version) if self._served else "initial"

    def mark_broken(self, reason: str) -> None:
        """Declare the server unusable until it is restarted (for instance: the engine died)."""
        if not self._broken:
            self._broken = reason
            logger.error("server %s is broken: %s", self._config.server_id, reason)

    def status(self) -> ServerStatus:
        """What ``GET /runtime/v1/status`` answers."""
        served, load = self._served, self._load()
        return ServerStatus(
            server_id=self._config.server_id,
            boot_id=self.boot_id,
            engine=self._engine,
            version=_field(self.version),
            digest=served.digest if served else "",
            broken=self._broken,
            world_size=self._config.tensor_parallel,
            capacity=self._config.max_concurrent,
            max_length=self._config.model.max_length,
            running=load.running,
            waiting=load.waiting,
            updates=self._updates,
            last_receive_ms=served.reply.receive_ms if served else None,
            last_pause_ms=served.reply.pause_ms if served else None,
            last_commit_ms=served.reply.commit_ms if served else None,
            groups=sorted(self._groups),
        )

    def beat(self) -> MemberBeat:
        """The heartbeat to send to the coordinator now."""
        served, load = self._served, self._load()
        return MemberBeat(
            server_id=self._config.server_id,
            boot_id=self.boot_id,
            url=self._config.advertise_url,
            engine=self._engine,
            world_size=self._config.tensor_parallel,
            capacity=self._config.max_concurrent,
            max_length=self._config.model.max_length,
            version=_field(self.version),
            broken=self._broken,
            running=load.running,
            waiting=load.waiting,
            last_pause_ms=served.reply.pause_ms if served else None,
        )

    # --- the weight-update group --------------------------------------------------------------------------------------

    async def init_group(self, request: InitGroupRequest) -> ServerVersion:
        """Join the group; groups of older epochs are left, and a transfer over one of them is given up.

        Raises:
            ContractError: 400, 409 (an older epoch, or another group under the same tag), 502, 503.
        """
        return await self._shielded(self._init_group(request))

    async def destroy_group(self, request: DestroyGroupRequest) -> None:
        """Leave the group of this tag, giving up a transfer over it; a no-op when it is not there."""
        await self._interrupt(request.tag, f"group {request.tag!r} was destroyed")
        await self._shielded(self._destroy_group(request))

    async def update(self, request: WeightUpdateRequest) -> WeightUpdateReply:
        """Receive, verify and commit one snapshot; at once when it is already served.

        A client that goes away does not stop it: the lost reply is settled by asking again or by the status.

        Raises:
            ContractError: see the class; the old weights are served on unless the status says broken.
        """
        if (known := self._already(request)) is not None:
            return known
        return await self._shielded(self._update(request))

    async def close(self) -> None:
        """Leave every group; called at shutdown."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for tag in list(self._groups):
            with contextlib.suppress(Exception):
                await self._leave(tag)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _init_group(self, request: InitGroupRequest) -> ServerVersion:
        if request.epoch < self._epoch:
            raise self._stale(request.epoch)
        expected = 1 + self._config.tensor_parallel
        if request.world_size != expected:
            raise ContractError(
                400,
                f"group {request.tag!r}: world_size {request.world_size}, but this server has "
                f"{self._config.tensor_parallel} worker(s) and needs {expected}",
            )
        if request.epoch > self._epoch:
            # A new trainer: what an old one still sends is worthless, and it must not hold up the new one.
            self._epoch = request.epoch
            for tag, group in list(self._groups.items()):
                if group.epoch < request.epoch:
                    await self._interrupt(tag, f"epoch {request.epoch} has started")
        async with self._turn():
            if request.epoch < self._epoch:
                raise self._stale(request.epoch)
            if self._broken:
                raise ContractError(503, self._broken_message())
            for tag, group in list(self._groups.items()):
                if group.epoch < request.epoch:
                    await self._leave(tag)
            present = self._groups.get(request.tag)
            if present == request:
                return self._server_version()
            if present is not None:
                raise ContractError(
                    409, f"tag {request.tag!r} is taken by another group: use a fresh tag for each join"
                )
            try:
                async with asyncio.timeout(self._deadline(request.timeout_seconds)):
                    await self._port.join(request)
            except ContractError:
                raise
            except TimeoutError as error:
                await self._leave(request.tag)
                raise ContractError(504, f"group {request.tag!r}: nobody met at {_address(request)} in time") from error
            except Exception as error:
                await self._leave(request.tag)
                raise ContractError(502, f"group {request.tag!r} at {_address(request)}: {error}") from error
            self._groups[request.tag] = request
            return self._server_version()

    async def _destroy_group(self, request: DestroyGroupRequest) -> None:
        async with self._turn():
            if request.tag in self._groups:
                await self._leave(request.tag)

    async def _update(self, request: WeightUpdateRequest) -> WeightUpdateReply:
        async with self._turn():
            if (known := self._already(request)) is not None:
                return known
            self._accept(request)
            await self._port.check(request)
            started = time.perf_counter()
            staged = await self._receive(request)
            received = time.perf_counter()
            commit_ms = await self._commit(request, staged)
            reply = WeightUpdateReply(
                epoch=request.epoch,
                step=request.step,
                boot_id=self.boot_id,
                digest=request.digest,
                receive_ms=1e3 * (received - started),
                pause_ms=1e3 * (time.perf_counter() - received),
                commit_ms=commit_ms,
            )
            self._served = _Served(Version(request.epoch, request.step), request.digest, reply)
            self._updates += 1
            return reply

    def _already(self, request: WeightUpdateRequest) -> WeightUpdateReply | None:
        served = self._served
        if served is None or self._broken or served.version != (request.epoch, request.step):
            return None
        if served.digest != request.digest:
            raise ContractError(
                409,
                f"version {served.version} is served with digest {served.digest}, the update carries {request.digest}: "
                "one version can have one content only",
            )
        return served.reply

    def _accept(self, request: WeightUpdateRequest) -> None:
        if self._broken:
            raise ContractError(503, self._broken_message())
        if request.epoch < self._epoch:
            raise self._stale(request.epoch)
        asked = Version(request.epoch, request.step)
        if self.version is not None and asked < self.version:
            raise ContractError(409, f"version {asked} is older than {self.version}, which is served")
        group = self._groups.get(request.tag)
        if group is None:
            raise ContractError(409, f"not in group {request.tag!r}: POST /init_process_group first")
        if group.epoch != request.epoch:
            raise ContractError(409, f"group {request.tag!r} belongs to epoch {group.epoch}, the update to {asked}")

    async def _receive(self, request: WeightUpdateRequest) -> Any:
        task = asyncio.ensure_future(self._port.receive(request))
        self._receiving = (request.tag, task)
        try:
            async with asyncio.timeout(self._deadline(request.timeout_seconds)):
                return await asyncio.shield(task)
        except TimeoutError as error:
            await self._give_up(request.tag, task)
            raise ContractError(
                504,
                f"version {request.epoch}.{request.step} did not arrive within "
                f"{self._deadline(request.timeout_seconds):g} s; the old weights are served on, join again",
            ) from error
        except asyncio.CancelledError:
            interrupted = task.cancelled()
            await self._give_up(request.tag, task)
            if interrupted:
                raise ContractError(
                    409, f"the transfer of version {request.epoch}.{request.step} was given up: its group has ended"
                ) from None
            raise
        except ContractError:
            raise
        except Exception as error:
            # The stream may be anywhere by now: the pair cannot be used again.
            await self._leave(request.tag)
            raise ContractError(
                502,
                f"version {request.epoch}.{request.step} was not received: {error}; the old weights are served on, "
                "join again",
            ) from error
        finally:
            self._receiving = None

    async def _commit(self, request: WeightUpdateRequest, staged: Any) -> float:
        """Pause, commit, set version, resume; milliseconds of the commit alone.

        Raises:
            ContractError: 503, and the server is broken unless nothing had been touched yet.
        """
        version = Version(request.epoch, request.step)
        touched = False
        try:
            async with asyncio.timeout(self._config.update_deadline_s):
                if isinstance(self._port, AtomicPort) and self._port.atomic(staged):
                    touched = True
                    return await self._port.install(staged, version)
                await self._port.pause()
                started = time.perf_counter()
                touched = True
                await self._port.commit(staged)
                commit_ms = 1e3 * (time.perf_counter() - started)
                await self._port.set_version(version)
                await self._port.resume()
        except BaseException as error:
            if touched:
                await self._break(f"the commit of version {version} failed half-way: {_describe(error)}")
            else:
                await self._resume_old(version, error)
            if isinstance(error, Exception):
                raise ContractError(503, f"version {version} could not be committed: {_describe(error)}") from error
            raise
        return commit_ms

    async def _resume_old(self, version: Version, cause: BaseException) -> None:
        """The pause failed and the weights are untouched: go on with them, if the engine still can."""
        try:
            async with asyncio.timeout(self._config.update_deadline_s):
                await self._port.resume()
        except Exception as error:
            await self._break(
                f"the engine could not be paused for version {version} ({_describe(cause)}) nor resumed "
                f"({_describe(error)})"
            )

    async def _break(self, reason: str) -> None:
        self.mark_broken(reason)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._config.update_deadline_s):
                await self._port.abort_all(reason)

    async def _interrupt(self, tag: str, why: str) -> None:
        if self._receiving is not None and self._receiving[0] == tag:
            logger.warning("giving up the transfer over group %r: %s", tag, why)
            self._receiving[1].cancel()

    async def _give_up(self, tag: str, task: asyncio.Task[Any]) -> None:
        """End the transfer from both sides: closing the group ends what the task waits for."""
        task.cancel()
        await self._leave(tag)
        await asyncio.wait([task], timeout=1.0)

    async def _leave(self, tag: str) -> None:
        self._groups.pop(tag, None)
        try:
            await self._port.leave(tag)
        except Exception:
            logger.exception("leaving group %r", tag)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= MAX_WAITING_UPDATES:
            raise ContractError(503, f"{self._waiting} weight-group requests are waiting already; retry later")
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    async def _shielded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end even if the HTTP request that asked for it is cancelled."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _deadline(self, asked: float) -> float:
        return min(asked, self._config.update_deadline_s)

    def _server_version(self) -> ServerVersion:
        return ServerVersion(boot_id=self.boot_id, version=_field(self.version))

    def _stale(self, epoch: int) -> ContractError:
        return ContractError(
            409, f"epoch {epoch} is over: epoch {self._epoch} has started, another trainer has taken over"
        )

    def _broken_message(self) -> str:
        return f"server {self._config.server_id} is broken and must be restarted: {self._broken}"


def check_token(headers: Mapping[str, str], token: str) -> None:
    """Check ``Authorization: Bearer <token>``, in constant time.

    Args:
        headers: a case-insensitive mapping, or one with lower-case keys.
        token: the job's token.

    Raises:
        ContractError: 401.
    """
    given = headers.get("authorization") or ""
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(value.strip().encode(), token.encode()):
        raise ContractError(401, "missing or wrong token: send 'Authorization: Bearer <token of the job>'")


class MembershipClient(Protocol):
    """The two calls of ``coordinator.client.CoordinatorClient`` that a server makes."""

    async def beat(self, request: MemberBeat) -> MemberReply:
        """Join or heartbeat."""

    async def leave(self, server_id: str, boot_id: str) -> None:
        """Leave the membership."""


async def heartbeat(
    client: MembershipClient,
    beat: Callable[[], MemberBeat],
    *,
    interval_s: float,
    leave_timeout_s: float = 2.0,
) -> None:
    """Announce the server every ``interval_s`` seconds until cancelled, then leave the membership.

    A coordinator that is away is logged once and asked again; the server goes on serving.

    Args:
        client: talks to the coordinator (with a short retry time: a beat is repeated anyway).
        beat: gives the beat to send now.
        interval_s: seconds between two beats.
        leave_timeout_s: how long the leave may take at shutdown.
    """
    away = False
    last: MemberBeat | None = None
    try:
        while True:
            last = beat()
            try:
                async with asyncio.timeout(max(5.0, 5 * interval_s)):
                    await client.beat(last)
                if away:
                    logger.info("the coordinator is back")
                away = False
            except Exception as error:
                if not away:
                    logger.warning("heartbeat failed, the coordinator is asked again: %s", _describe(error))
                away = True
            await asyncio.sleep(interval_s)
    finally:
        if last is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(leave_timeout_s):
                    await client.leave(last.server_id, last.boot_id)


def _field(version: Version | None) -> VersionField | None:
    return VersionField(epoch=version.epoch, step=version.step) if version is not None else None


def _address(request: InitGroupRequest) -> str:
    return f"{request.master_address}:{request.master_port}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
