"""The operator's own HTTP server: probes and metrics. Read-only, without a token, and without anything about a job."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

SHUTDOWN_S: Final = 1.0
KEEP_ALIVE_S: Final = 30.0

Check = Callable[[], str]
"""Says in a sentence what is wrong; empty when nothing is."""


class ServerError(Exception):
    """The server cannot be started; the message says why and what to do."""


@contextlib.asynccontextmanager
async def serving(
    host: str, port: int, *, healthy: Check, ready: Check, registry: CollectorRegistry
) -> AsyncIterator[int]:
    """Answer ``/healthz``, ``/readyz`` and ``/metrics`` within the block.

    Args:
        host: address to listen on; ``0.0.0.0`` or ``::`` for all of them.
        port: to listen on; 0 for any free one.
        healthy: a sentence makes the kubelet restart this process.
        ready: a sentence takes this process out of its Service.
        registry: what ``/metrics`` shows.

    Yields:
        The port.

    Raises:
        ServerError: the port cannot be listened on.
    """
    app = web.Application(client_max_size=1024)
    app.add_routes(
        [
            web.get("/healthz", _probe(healthy)),
            web.get("/readyz", _probe(ready)),
            web.get("/metrics", _metrics(registry)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=KEEP_ALIVE_S)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"probes and metrics cannot be served on {host}, port {port}: {error}. Choose another address or port, "
                "or end what listens there, perhaps another operator"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _probe(check: Check) -> Handler:
    async def probe(_: web.Request) -> web.StreamResponse:
        try:
            wrong = check()
        except Exception as error:  # a check that cannot tell is no reason to say that all is well
            wrong = f"the check failed: {type(error).__name__}: {error}"
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    return probe


def _metrics(registry: CollectorRegistry) -> Handler:
    async def metrics(request: web.Request) -> web.StreamResponse:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(registry), headers={hdrs.CONTENT_TYPE: content_type})

    return metrics
