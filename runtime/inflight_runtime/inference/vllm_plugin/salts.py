"""What every request gets on its way into the engine, by whichever route it came.

Its prefix-cache salt is the weight version at its admission: cached KV is shared within a version and never crosses to
another.
"""

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
    unseeded = seeds_kill(engine.vllm_config)

    def generate(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if service.broken:
            raise GracefulHTTPError(
                f"the server is broken and must be restarted: {service.broken}", HTTPStatus.SERVICE_UNAVAILABLE
            )
        if not isinstance(prompt, dict):
            raise GracefulHTTPError("only a rendered prompt can carry a cache salt", HTTPStatus.BAD_REQUEST)
        if unseeded:
            sampling_params.seed = None
        salted = {**prompt, "cache_salt": salt(service.salt, prompt.get("cache_salt"))}
        return original(salted, sampling_params, *args, **kwargs)

    engine.generate = generate


def seeds_kill(config: Any) -> bool:
    """Whether a seeded request can take the engine down: on CPU, as soon as its prefill is split over two steps."""
    return bool(config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill)


def salt(version: str, own: str | None) -> str:
    """The version's salt; one that the client sent keeps apart what it kept apart."""
    return f"{version}:{own}" if own else version
