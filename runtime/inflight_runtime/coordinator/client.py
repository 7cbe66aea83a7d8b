"""The coordinator's client, used by every other role.

Every request is idempotent on the server's side, so connection errors, timeouts and 5xx answers are simply repeated:
a coordinator that is killed and restarted costs the others a pause and nothing else. Imports neither torch nor an
engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp
import msgpack
from pydantic import BaseModel, ValidationError
from yarl import URL

from inflight_runtime.protocol import (
    CheckpointDurable,
    DatasetInfo,
    DropRequest,
    ErrorReply,
    FailRequest,
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
)
from inflight_runtime.types import Group, decode_group, encode_group

ReplyT = TypeVar("ReplyT", bound=BaseModel)

FIRST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 2.0
CONNECTIONS: Final = 64
CONFLICT: Final = 409


class CoordinatorError(Exception):
    """The coordinator refused a request (4xx): repeating it would not help.

    Attributes:
        status: the HTTP status.
        message: the coordinator's own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"coordinator answered {status}: {message}")
        self.status = status
        self.message = message


class FencedError(CoordinatorError):
    """409: the caller's epoch, fence or boot id is no longer the current one; what it holds is not its own any more."""


class CoordinatorUnavailableError(Exception):
    """The coordinator did not answer within the client's ``retry_for_s``."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What step ``step`` is trained on.

    Attributes:
        policy_step: the step whose weights the batch is trained from: ``step - 1``.
        planned_groups: B of the job; the step's denominator, whatever was dropped from it.
        excluded: groups that used a slot of this batch and are not trained, by reason.
        groups: in canonical order (ascending group id).
    """

    step: int
    policy_step: int
    planned_groups: int
    excluded: dict[str, int]
    groups: list[Group]


class CoordinatorClient:
    """Talks to the coordinator from one event loop; safe to share between that loop's tasks.

    Every method raises:
        CoordinatorError: the request was refused; :class:`FencedError` when the caller has been superseded.
        CoordinatorUnavailableError: no answer within ``retry_for_s``.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0, retry_for_s: float = 120.0) -> None:
        """Make a client; nothing is connected yet.

        Args:
            url: base URL, for instance ``http://127.0.0.1:8600``.
            token: the job's bearer token.
            timeout_s: deadline of one try, in seconds (a long poll gets its ``wait_seconds`` on top).
            retry_for_s: how long tries go on while the coordinator is away, in seconds; 0: one try.
        """
        self._base = URL(url.rstrip("/"))
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. The client may be used again afterwards."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- leases and rollouts ------------------------------------------------------------------------------------------

    async def announce_dataset(self, info: DatasetInfo) -> None:
        """Say how many problems the environment offers."""
        await self._send("POST", "v1/dataset", info)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for groups to work on; waits up to ``request.wait_seconds`` for the first."""
        return await self._ask("POST", "v1/leases", LeaseReply, request, wait_s=request.wait_seconds)

    async def renew(self, request: RenewRequest) -> RenewReply:
        """Keep leases alive; the reply names those that were lost."""
        return await self._ask("POST", "v1/leases/renew", RenewReply, request)

    async def release(self, request: RenewRequest) -> None:
        """Hand groups back unfinished."""
        await self._send("POST", "v1/leases/release", request)

    async def submit(self, group: Group) -> SubmitReply:
        """Hand in a finished group. Durable when this returns.

        Raises:
            FencedError: the lease has expired and the group is, or will be, somebody else's.
        """
        return await self._ask("POST", "v1/groups", SubmitReply, encode_group(group))

    async def drop(self, group_id: int, request: DropRequest) -> None:
        """Give up one group; its slot is returned."""
        await self._send("POST", f"v1/groups/{group_id}/drop", request)

    # --- trainer ------------------------------------------------------------------------------------------------------

    async def start_trainer(self, request: TrainerStart) -> TrainerStarted:
        """Begin a trainer's life: raises the epoch and takes back every step after ``resume_step``."""
        return await self._ask("POST", "v1/trainer/start", TrainerStarted, request)

    async def batch(self, step: int, epoch: int, wait_seconds: float) -> StepBatch | None:
        """Get the groups of a step, always the same ones; ``None`` when they are not there within ``wait_seconds``.

        Raises:
            FencedError: another trainer has started since.
            CoordinatorError: 410, the run has failed (the message says why) or the step's rollouts are gone.
        """
        body = await self._send(
            "GET",
            f"v1/steps/{step}/batch",
            query={"epoch": str(epoch), "wait_seconds": str(wait_seconds)},
            wait_s=wait_seconds,
        )
        if not body:
            return None
        raw = msgpack.unpackb(body, raw=False)
        return StepBatch(
            step=raw["step"],
            policy_step=raw["policy_step"],
            planned_groups=raw["planned_groups"],
            excluded=dict(raw["excluded"]),
            groups=[decode_group(data) for data in raw["groups"]],
        )

    async def commit(self, step: int, request: StepCommit) -> None:
        """Report a step as trained. Idempotent."""
        await self._send("POST", f"v1/steps/{step}/commit", request)

    async def checkpoint(self, request: CheckpointDurable) -> None:
        """Report a checkpoint as durable, so that payloads it makes superfluous may go."""
        await self._send("POST", "v1/checkpoints", request)

    # --- membership ---------------------------------------------------------------------------------------------------

    async def beat(self, request: MemberBeat) -> MemberReply:
        """Announce a server: join and heartbeat in one."""
        return await self._ask("POST", "v1/members", MemberReply, request)

    async def leave(self, server_id: str, boot_id: str) -> None:
        """Take a server out; a no-op when this boot id is not the current one."""
        await self._send("POST", f"v1/members/{server_id}/leave", query={"boot_id": boot_id})

    async def set_member_state(self, server_id: str, request: MemberState) -> None:
        """Set a server's state (the publisher's call).

        Raises:
            FencedError: the epoch is stale, or the server has restarted under another boot id.
        """
        await self._send("POST", f"v1/members/{server_id}/state", request)

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        """Get the membership; waits up to ``wait_seconds`` for one newer than ``revision``."""
        query = {"revision": str(revision), "wait_seconds": str(wait_seconds)}
        return await self._ask("GET", "v1/members", MembersReply, query=query, wait_s=wait_seconds)

    # --- run ----------------------------------------------------------------------------------------------------------

    async def samples(self, step: int | None = None, limit: int = 32) -> list[dict[str, Any]]:
        """Get trained attempts as people read them, newest step first when ``step`` is ``None``.

        Each has ``group_id, problem_index, attempt, step, state, reward, parts, status, finish, prompt_text, text,
        error, tokens, versions`` (``["epoch.step", ...]`` in order of appearance) and ``servers``.
        """
        query = {"limit": str(limit)} | ({} if step is None else {"step": str(step)})
        body = await self._send("GET", "v1/samples", query=query)
        return list(json.loads(body))

    async def fail(self, request: FailRequest) -> None:
        """End the run as failed."""
        await self._send("POST", "v1/fail", request)

    async def state(self) -> RunState:
        """Get everything that is shown of the run."""
        return await self._ask("GET", "v1/state", RunState)

    # --- transport ----------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        reply: type[ReplyT],
        body: BaseModel | bytes | None = None,
        *,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> ReplyT:
        data = await self._send(method, path, body, query=query, wait_s=wait_s)
        try:
            return reply.model_validate_json(data)
        except ValidationError as error:
            raise CoordinatorError(200, f"{method} /{path}: the reply does not fit this version: {error}") from error

    async def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | bytes | None = None,
        *,
        query: dict[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> bytes:
        url = (self._base / path).with_query(query or {})
        headers = dict(self._headers)
        data: bytes | None = None
        if isinstance(body, BaseModel):
            data, headers["Content-Type"] = body.model_dump_json().encode(), "application/json"
        elif body is not None:
            data, headers["Content-Type"] = body, "application/msgpack"
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._retry_for_s
        backoff = FIRST_BACKOFF_S
        while True:
            try:
                status, answer = await self._try(method, url, data, headers, self._timeout_s + wait_s)
            except TimeoutError:
                problem = f"no answer within {self._timeout_s + wait_s:g} s"
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if status < 300:
                    return answer
                if status < 500:
                    raise (FencedError if status == CONFLICT else CoordinatorError)(status, _message(answer))
                problem = f"status {status}: {_message(answer)}"
            # Jitter keeps the roles from coming back in step after a restart.
            pause = backoff * random.uniform(0.5, 1.5)  # noqa: S311
            if loop.time() + pause > give_up:
                raise CoordinatorUnavailableError(
                    f"{method} {url}: {problem}; gave up after {self._retry_for_s:g} s. "
                    "Is the coordinator running, and is this its address?"
                )
            await asyncio.sleep(pause)
            backoff = min(backoff * 2, LONGEST_BACKOFF_S)

    async def _try(
        self, method: str, url: URL, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
            return response.status, await response.read()


def _message(body: bytes) -> str:
    try:
        return ErrorReply.model_validate_json(body).error
    except ValidationError:
        return body[:300].decode(errors="replace")
