"""Sends generate requests to the inference servers: follows the membership, retries elsewhere within bounds."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import aiohttp
from pydantic import ValidationError

from inflight_runtime.actor.metrics import ActorMetrics
from inflight_runtime.actor.routing import Server, ServerKey, ServerRecord, choose, explain
from inflight_runtime.coordinator.client import CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.protocol import Completion, ErrorReply, GenerateReply, GenerateRequest, MembersReply
from inflight_runtime.types import Version

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0
"""Shorter than uvicorn's default of 5 s, so that we are the side that closes an idle connection."""
FIRST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 5.0
POLL_S: Final = 20.0
WAIT_TICK_S: Final = 0.25
SILENT_S: Final = 2.0
"""A server that is evicted and has not been heard of for this long will not answer what it was asked either."""
RETRYABLE_STATUS: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class GenerationError(Exception):
    """No answer was to be had from the inference servers."""


class GenerationRefusedError(GenerationError):
    """A server refused the request itself (400 and the like): another one would as well."""


class NoServerError(GenerationError):
    """No server could be used for as long as we were prepared to wait."""


class _ServerError(Exception):
    """A server, or the way to it, failed: try elsewhere."""


class Sampled(NamedTuple):
    """One answer and the process it comes from."""

    completion: Completion
    server_id: str
    boot_id: str


class MembersSource(Protocol):
    """Where the membership comes from (the coordinator's client)."""

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        """Get the membership once it is newer than ``revision``."""


@dataclass(slots=True, eq=False)
class Route:
    """What binds the requests of one group together.

    Attributes:
        min_version: only servers at this version or later may serve it.
        affinity: the server that got the group's last request (its prompt is in that cache).
    """

    min_version: Version
    affinity: ServerKey | None = None


class Router:
    """Chooses servers and talks to them. Lives on one event loop."""

    def __init__(
        self,
        source: MembersSource,
        token: str,
        metrics: ActorMetrics,
        *,
        timeout_s: float = 600.0,
        retries: int = 5,
        wait_for_server_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        """Make a router; :meth:`start` connects it.

        Args:
            source: where the membership comes from.
            token: the job's bearer token.
            metrics: where requests are counted.
            timeout_s: deadline of one request, in seconds.
            retries: how often a request is sent again after a failure.
            wait_for_server_s: how long a request waits while no server may be used, in seconds.
            seed: of the jitter.
        """
        self._source = source
        self._token = token
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._retries = retries
        self._wait_for_server_s = wait_for_server_s
        self._jitter = random.Random(seed)  # noqa: S311
        self._servers: list[Server] = []
        self._records: dict[ServerKey, ServerRecord] = {}
        self._picks = 0
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool and begin to follow the membership."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {self._token}"},
        )
        self._poller = asyncio.create_task(self._follow(), name="membership")

    async def close(self) -> None:
        """Stop following and close the connections."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def servers(self) -> Sequence[Server]:
        """The newest membership."""
        return self._servers

    def update(self, members: MembersReply) -> None:
        """Take over a snapshot.

        What is in flight at a process that has restarted, or is evicted and silent, is asked of another one at once: a
        server that has stopped keeps its connections open and would hold them up to the request's deadline. One that
        is only missing may go on: so they all are for a moment after the coordinator has restarted.
        """
        self._servers = [Server.of(member) for member in members.members]
        boot_ids = {server.server_id: server.boot_id for server in self._servers}
        silent = {
            ServerKey(member.server_id, member.boot_id): f"evicted ({member.reason or 'no reason given'})"
            for member in members.members
            if member.state == "EVICTED" and member.seconds_since_beat >= SILENT_S
        }
        for key, record in list(self._records.items()):
            if boot_ids.get(key.server_id, key.boot_id) != key.boot_id:
                record.give_up("has restarted")
            elif key in silent:
                record.give_up(silent[key])
            if boot_ids.get(key.server_id) != key.boot_id and record.in_flight == 0:
                del self._records[key]
        self._changed.set()

    async def generate(self, request: GenerateRequest, route: Route) -> list[Sampled]:
        """Get ``request.n`` answers, in the order of ``request.seeds``.

        Answers that a server aborted are asked for again elsewhere; those that came are kept.

        Raises:
            GenerationRefusedError: the request is wrong.
            NoServerError: no server may be used, for too long.
            GenerationError: every try failed.
        """
        results: list[Sampled | None] = [None] * request.n
        missing = list(range(request.n))
        avoid: set[ServerKey] = set()
        problems: list[str] = []
        while True:
            server = await self._pick(route, avoid)
            try:
                reply = await self._post(server, _part(request, missing), route.min_version)
            except _ServerError as error:
                problems.append(f"{server.server_id}: {error}")
            else:
                route.affinity = server.key
                for slot, completion in zip(missing, reply.completions, strict=True):
                    if completion.finish != "abort":
                        results[slot] = Sampled(completion, reply.server_id, reply.boot_id)
                missing = [slot for slot in missing if results[slot] is None]
                if not missing:
                    return [sampled for sampled in results if sampled is not None]
                problems.append(f"{server.server_id}: aborted {len(missing)} answers")
            self._metrics.request_retries.inc()
            avoid.add(server.key)
            if len(problems) > self._retries:
                raise GenerationError(
                    f"no answer after {len(problems)} tries; the last: {problems[-1]} (all: {sorted(set(problems))})"
                )
            backoff = min(FIRST_BACKOFF_S * 2 ** (len(problems) - 1), LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff * self._jitter.uniform(0.5, 1.5))

    # --- one try ------------------------------------------------------------------------------------------------------

    async def _post(self, server: Server, request: GenerateRequest, min_version: Version) -> GenerateReply:
        record = self._record(server.key)
        record.in_flight += request.n
        record.breaker.begin()
        body = request.model_dump_json(exclude_defaults=True).encode()
        exchange = asyncio.create_task(self._exchange(server.url, body))
        record.exchanges[exchange] = ""
        try:
            try:
                status, answer = await exchange
            except asyncio.CancelledError:
                task = asyncio.current_task()
                reason = record.exchanges[exchange]
                if reason and task is not None and not task.cancelling():
                    raise _ServerError(reason) from None
                raise
            if status in RETRYABLE_STATUS:
                raise _ServerError(f"status {status}: {_error_text(answer)}")
            reply = _read(answer, server, request.n, min_version) if status == 200 else None
        except _ServerError:
            record.breaker.failure(asyncio.get_running_loop().time())
            raise
        except BaseException:
            exchange.cancel()
            record.breaker.withdrawn()
            raise
        finally:
            record.in_flight -= request.n
            del record.exchanges[exchange]
            self._changed.set()
        record.breaker.success()  # one that refuses a request is alive as well
        if reply is None:
            raise GenerationRefusedError(f"{server.server_id} answered {status}: {_error_text(answer)}")
        return reply

    async def _exchange(self, url: str, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            raise GenerationError("the router is not started")
        for stale_connection_possible in (True, False):
            try:
                async with self._session.post(
                    f"{url}/runtime/v1/generate", data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    return response.status, await response.read()
            except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                # A pooled connection that the server has closed meanwhile looks like this: one free try on a new one.
                # Sending twice does no harm, the answers of the first are not read by anyone.
                if not stale_connection_possible:
                    raise _ServerError(f"connection lost: {error}") from error
            except TimeoutError as error:
                raise _ServerError(f"no answer within {self._timeout_s:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise _ServerError(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _pick(self, route: Route, avoid: set[ServerKey]) -> Server:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._wait_for_server_s
        while True:
            server = choose(
                self._servers,
                self._record,
                min_version=route.min_version,
                affinity=route.affinity,
                avoid=avoid,
                now=loop.time(),
            )
            if server is not None:
                self._picks += 1
                self._record(server.key).last_pick = self._picks
                return server
            left = give_up - loop.time()
            if left <= 0:
                raise NoServerError(
                    f"no server to send to for {self._wait_for_server_s:g} s: "
                    f"{explain(self._servers, self._records, route.min_version)}"
                )
            self._changed.clear()
            try:  # the tick is for circuits that close by the clock
                async with asyncio.timeout(min(left, WAIT_TICK_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _record(self, key: ServerKey) -> ServerRecord:
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = ServerRecord()
        return record

    async def _follow(self) -> None:
        """Long-poll the membership for ever; while the coordinator is away the last snapshot stays in use."""
        revision = -1
        while True:
            try:
                reply = await self._source.members(revision, POLL_S)
            except (CoordinatorUnavailableError, CoordinatorError) as error:
                log.warning("membership: %s; using the last one known", error)
                await asyncio.sleep(LONGEST_BACKOFF_S)
                continue
            except Exception:
                log.exception("membership: unexpected failure; using the last one known")
                await asyncio.sleep(LONGEST_BACKOFF_S)
                continue
            revision = reply.revision
            self.update(reply)


def _part(request: GenerateRequest, slots: Sequence[int]) -> GenerateRequest:
    if len(slots) == request.n:
        return request
    seeds = None if request.seeds is None else [request.seeds[slot] for slot in slots]
    return request.model_copy(update={"n": len(slots), "seeds": seeds})


def _read(answer: bytes, server: Server, count: int, min_version: Version) -> GenerateReply:
    """Check a reply before anything of it is believed."""
    try:
        reply = GenerateReply.model_validate_json(answer)
    except ValidationError as error:
        raise _ServerError(f"the reply does not fit this version: {error}") from error
    if (reply.server_id, reply.boot_id) != (server.server_id, server.boot_id):
        raise _ServerError(
            f"answered as {reply.server_id} boot {reply.boot_id}, not as boot {server.boot_id}: it has restarted"
        )
    if len(reply.completions) != count:
        raise _ServerError(f"{len(reply.completions)} answers instead of {count}")
    for completion in reply.completions:
        if completion.finish == "abort":
            continue
        position = 0
        for span in completion.spans:
            if span.start != position or span.end <= span.start:
                raise _ServerError("the version spans do not tile the answer")
            if (span.epoch, span.step) < min_version:
                raise _ServerError(f"sampled under {span.epoch}.{span.step}, wanted {min_version} or later")
            position = span.end
        if not (position == len(completion.ids) == len(completion.logprobs)):
            raise _ServerError(
                f"{len(completion.ids)} ids, {len(completion.logprobs)} logprobs, spans up to {position}: must match"
            )
    return reply


def _error_text(answer: bytes) -> str:
    try:
        return ErrorReply.model_validate_json(answer).error
    except ValidationError:
        return answer[:300].decode(errors="replace")
