"""The door of the server: the job's token on every route but health, one more spelling, no traffic when broken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError

from inflight_runtime.inference.service import ContractError, UpdateService, check_token
from inflight_runtime.protocol import ErrorReply

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/metrics"})
"""Probes and scrapers carry no token. (vLLM itself guards only /v1, /v2, /inference and /cohere.)"""
ALIASES: Final = {"/v1/chat/completion": "/v1/chat/completions"}
MAX_SALT: Final = 128
"""vLLM's limit."""


class Guard:
    """Pure ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token, then pass on."""
        if scope["type"] in ("http", "websocket"):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path not in OPEN_PATHS and scope.get("method") != "OPTIONS":
                try:
                    check_token(Headers(scope=scope), self.token)
                except ContractError as error:
                    await error_response(error)(scope, receive, send)
                    return
            if path in ALIASES:
                scope = {**scope, "path": ALIASES[path], "raw_path": ALIASES[path].encode()}
        await self.app(scope, receive, send)


def salt_prompts(engine: Any, service: UpdateService) -> None:
    """Make every request of every route carry the version at its admission as prefix-cache salt.

    Cached KV is then shared within a version and never crosses to another. A salt that the client sent keeps apart what
    it kept apart. A broken server refuses (503) whatever comes in by vLLM's own routes.
    """
    original: Callable[..., Any] = engine.generate

    def generate(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if service.broken:
            raise GracefulHTTPError(f"server is broken and must be restarted: {service.broken}", _UNAVAILABLE)
        if not isinstance(prompt, dict):
            raise GracefulHTTPError("only rendered prompts can be salted with the weight version", HTTPStatus(400))
        return original({**prompt, "cache_salt": salt(service.salt, prompt.get("cache_salt"))}, *args, **kwargs)

    engine.generate = generate


def salt(version: str, own: str | None) -> str:
    """The version's salt, joined with the client's own if it sent one."""
    return f"{version}:{own}"[:MAX_SALT] if own else version


def error_response(error: ContractError) -> JSONResponse:
    """The contract's error body."""
    return JSONResponse(ErrorReply(error=error.message).model_dump(exclude_none=True), status_code=error.status)


_UNAVAILABLE: Final = HTTPStatus.SERVICE_UNAVAILABLE
Handler = Callable[..., Awaitable[Any]]
