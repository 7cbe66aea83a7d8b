"""Probes and metrics over HTTP."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from inflight_operator.server import ServerError, serving

DEADLINE_S = 20.0


async def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response,
    ):
        return response.status, response.headers["Content-Type"], await response.text()


async def test_probes_say_in_a_sentence_what_is_wrong() -> None:
    wrong = {"healthy": "", "ready": "no Lease yet"}

    def ready() -> str:
        if wrong["ready"] == "broken":
            raise KeyError("x")
        return wrong["ready"]

    async with serving(
        "127.0.0.1", 0, healthy=lambda: wrong["healthy"], ready=ready, registry=CollectorRegistry()
    ) as port:
        assert (await get(port, "/healthz"))[::2] == (200, "ok\n")
        assert (await get(port, "/readyz"))[::2] == (503, "no Lease yet\n")
        wrong |= {"healthy": "a reconcile has taken 300 s", "ready": ""}
        assert (await get(port, "/healthz"))[::2] == (503, "a reconcile has taken 300 s\n")
        assert (await get(port, "/readyz"))[::2] == (200, "ok\n")
        wrong["ready"] = "broken"
        assert (await get(port, "/readyz"))[::2] == (503, "the check failed: KeyError: 'x'\n")
        assert (await get(port, "/"))[0] == 404


async def test_metrics_come_in_the_form_that_the_scraper_asks_for() -> None:
    registry = CollectorRegistry()
    Counter("things_total", "Things.", registry=registry).inc(3)
    async with serving("127.0.0.1", 0, healthy=str, ready=str, registry=registry) as port:
        status, content_type, text = await get(port, "/metrics")
        assert status == 200
        assert content_type.startswith("text/plain; version=")
        assert "things_total 3.0\n" in text
        _, content_type, text = await get(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")


async def test_a_port_that_is_taken_is_said_clearly_and_free_again_afterwards() -> None:
    def server(port: int) -> object:
        return serving("127.0.0.1", port, healthy=str, ready=str, registry=CollectorRegistry())

    async with server(0) as port:  # type: ignore[attr-defined]
        with pytest.raises(ServerError, match=rf"127\.0\.0\.1, port {port}: .*in use.*another address or port"):
            async with server(port):  # type: ignore[attr-defined]
                pass
    async with server(port) as again:  # type: ignore[attr-defined]
        assert again == port


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99_999), ("192.0.2.1", 0), ("no host", 0)])
async def test_an_address_that_cannot_be_is_said_clearly(host: str, port: int) -> None:
    with pytest.raises(ServerError, match="cannot be served"):
        async with serving(host, port, healthy=str, ready=str, registry=CollectorRegistry()):
            pass
