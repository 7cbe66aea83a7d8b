from __future__ import annotations

from typing import Any

import pytest

from inflight_runtime.inference.vllm_plugin.guard import Guard


async def ask(path: str, headers: dict[str, str], method: str = "POST", kind: str = "http") -> tuple[int, str]:
    """Status and the path that the application saw (empty when it was not reached)."""
    seen: list[str] = []
    status: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "method": method, "headers": raw, "root_path": ""}
    await Guard(app, "t")(scope, receive, send)
    return status[0], "".join(seen)


TOKEN = {"authorization": "Bearer t"}


@pytest.mark.parametrize(
    "path", ["/runtime/v1/status", "/v1/models", "/invocations", "/tokenize", "/docs", "/", "/health/x"]
)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer other"}])
async def test_no_route_answers_without_the_token(path: str, headers: dict[str, str]) -> None:
    assert await ask(path, headers) == (401, "")
    assert await ask(path, TOKEN) == (200, path)


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/healthz", "/readyz"])
async def test_probes_need_none(path: str) -> None:
    assert await ask(path, {}, "GET") == (200, path)


async def test_the_singular_spelling_is_the_same_route() -> None:
    assert await ask("/v1/chat/completion", TOKEN) == (200, "/v1/chat/completions")
    assert await ask("/v1/chat/completion", {}) == (401, "")


async def test_the_servers_own_life_cycle_passes() -> None:
    assert (await ask("/", {}, kind="lifespan"))[0] == 200
