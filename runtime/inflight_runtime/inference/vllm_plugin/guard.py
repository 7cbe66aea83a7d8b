"""The door of the server: the job's token on every route but health, and one more spelling."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight_runtime.inference.service import ContractError, check_token
from inflight_runtime.protocol import ErrorReply

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/metrics", "/healthz", "/readyz"})
"""Probes and scrapers have no token to send. (vLLM itself guards only /v1, /v2, /inference and /cohere.)"""
ALIASES: Final = {"/v1/chat/completion": "/v1/chat/completions"}


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


def error_response(error: ContractError) -> JSONResponse:
    """The contract's error body."""
    return JSONResponse(ErrorReply(error=error.message).model_dump(exclude_none=True), status_code=error.status)
