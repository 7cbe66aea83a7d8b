"""Prefix-cache salts: cached KV is shared within a weight version and never crosses to another."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError

from inflight_runtime.inference.service import UpdateService


def salt_prompts(engine: Any, service: UpdateService) -> None:
    """Make every request of every route carry the version at its admission as salt.

    All routes, vLLM's own included, reach the engine by ``generate``. There a broken server refuses them (503), too.
    """
    original: Callable[..., Any] = engine.generate

    def generate(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if service.broken:
            raise GracefulHTTPError(
                f"the server is broken and must be restarted: {service.broken}", HTTPStatus.SERVICE_UNAVAILABLE
            )
        if not isinstance(prompt, dict):
            raise GracefulHTTPError("only a rendered prompt can carry a cache salt", HTTPStatus.BAD_REQUEST)
        return original({**prompt, "cache_salt": salt(service.salt, prompt.get("cache_salt"))}, *args, **kwargs)

    engine.generate = generate


def salt(version: str, own: str | None) -> str:
    """The version's salt; one that the client sent keeps apart what it kept apart."""
    return f"{version}:{own}" if own else version
