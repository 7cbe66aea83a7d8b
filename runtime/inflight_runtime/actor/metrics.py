"""The actor's Prometheus metrics and its small health server."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

ROLLOUT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ActorMetrics:
    """Counters of one actor, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.groups = Counter(
            "inflight_actor_groups", "Groups finished, by what became of them.", ["outcome"], registry=self.registry
        )
        self.attempts = Counter(
            "inflight_actor_attempts", "Attempts finished, by status.", ["status"], registry=self.registry
        )
        self.attempt_retries = Counter(
            "inflight_actor_attempt_retries", "Attempts started again after a failure.", registry=self.registry
        )
        self.sampled_tokens = Counter(
            "inflight_actor_sampled_tokens", "Tokens sampled in finished attempts.", registry=self.registry
        )
        self.request_retries = Counter(
            "inflight_actor_request_retries", "Generate requests sent again.", registry=self.registry
        )
        self.leases_lost = Counter(
            "inflight_actor_leases_lost", "Leases that expired or were fenced off.", registry=self.registry
        )
        self.groups_active = Gauge("inflight_actor_groups_active", "Groups in progress.", registry=self.registry)
        self.hung_threads = Gauge(
            "inflight_actor_hung_threads", "Threads held by blocking calls past their deadline.", registry=self.registry
        )
        self.rollout_seconds = Histogram(
            "inflight_actor_rollout_seconds",
            "Time from a group's lease to its last attempt.",
            buckets=ROLLOUT_BUCKETS,
            registry=self.registry,
        )


async def serve_health(host: str, port: int, metrics: ActorMetrics, ready: Callable[[], str]) -> web.AppRunner:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics``.

    Args:
        host: address to bind.
        port: its port.
        metrics: what to show.
        ready: gives an empty string when ready, else the reason why not.

    Returns:
        The runner; ``await runner.cleanup()`` ends it.

    Raises:
        OSError: the port is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why_not = ready()
        return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
