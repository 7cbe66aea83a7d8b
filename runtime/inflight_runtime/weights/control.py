"""The trainer's HTTP calls to one inference server's weight routes."""

from __future__ import annotations

from typing import Final, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from inflight_runtime.protocol import (
    DestroyGroupRequest,
    ErrorReply,
    InitGroupRequest,
    ServerStatus,
    ServerVersion,
    WeightUpdateReply,
    WeightUpdateRequest,
)

ReplyT = TypeVar("ReplyT", bound=BaseModel)

STATUS_TIMEOUT_S: Final = 2.0
FAREWELL_TIMEOUT_S: Final = 1.0
KEEP_ALIVE_S: Final = 4.0
"""Idle connections are dropped before a server drops them (uvicorn: after 5 s), lest an update meets a dead one."""
LONGEST_MESSAGE: Final = 500


class ServerRefusedError(Exception):
    """The inference server answered, and the answer is no.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class ServerUnreachableError(Exception):
    """No whole answer came; the server may or may not have done what it was asked to."""


def new_session(token: str) -> aiohttp.ClientSession:
    """A session for all servers: keep-alive, and the job's token on every request."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
    )


class ServerControl:
    """One server's routes. Every call has a deadline.

    Every method raises:
        ServerRefusedError: an answer other than 2xx, or one that does not fit.
        ServerUnreachableError: no answer in time, or the connection broke.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def status(self) -> ServerStatus:
        """Ask what it is and serves."""
        return _parsed(ServerStatus, await self._call("GET", "runtime/v1/status", None, STATUS_TIMEOUT_S))

    async def init_group(self, request: InitGroupRequest, timeout_s: float) -> ServerVersion:
        """Have it join a pair; answers when both sides have met."""
        return _parsed(ServerVersion, await self._call("POST", "init_process_group", request, timeout_s))

    async def update(self, request: WeightUpdateRequest, timeout_s: float) -> WeightUpdateReply:
        """Have it receive and commit a snapshot; answers when it serves it."""
        return _parsed(WeightUpdateReply, await self._call("POST", "request_weight_update", request, timeout_s))

    async def destroy_group(self, tag: str) -> None:
        """Have it leave a pair."""
        await self._call("POST", "destroy_process_group", DestroyGroupRequest(tag=tag), FAREWELL_TIMEOUT_S)

    async def _call(self, method: str, path: str, body: BaseModel | None, timeout_s: float) -> bytes:
        url = f"{self._url}/{path}"
        data = None if body is None else body.model_dump_json().encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                answer = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerUnreachableError(f"{method} {url}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachableError(f"{method} {url}: {type(error).__name__}: {error}") from error
        if status >= 300:
            raise ServerRefusedError(status, f"{method} {url}: {_message(answer)}")
        return answer


def _parsed(model: type[ReplyT], answer: bytes) -> ReplyT:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        raise ServerRefusedError(200, f"the answer is no {model.__name__} of this version: {error}") from error


def _message(answer: bytes) -> str:
    try:
        return ErrorReply.model_validate_json(answer).error
    except ValidationError:
        return answer[:LONGEST_MESSAGE].decode(errors="replace")
