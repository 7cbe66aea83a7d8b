from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from inflight_runtime.coordinator.client import CoordinatorClient, CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.protocol import LeaseRequest, RenewRequest


class Moody:
    """A server that misbehaves as told, then answers."""

    def __init__(self) -> None:
        self.moods: list[str] = []
        self.bodies: list[bytes] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        mood = self.moods.pop(0) if self.moods else "well"
        if mood == "hang up":
            assert request.transport is not None
            request.transport.close()
        if mood == "nonsense":
            return web.Response(body=b'{"surprise": 1}')
        if mood.isdigit():
            return web.Response(status=int(mood), body=b'{"error": "told to"}')
        return web.Response(body=b'{"lost": []}')


@pytest.fixture
async def moody() -> AsyncIterator[Moody]:
    server = Moody()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


RENEW = RenewRequest(actor_id="a", leases=[])


@pytest.mark.parametrize("moods", [["503", "500"], ["hang up"], ["hang up", "503", "hang up"]])
async def test_the_same_request_is_sent_until_it_is_answered(moody: Moody, moods: list[str]) -> None:
    moody.moods = list(moods)
    async with CoordinatorClient(moody.url, "t") as client:
        assert (await client.renew(RENEW)).lost == []
    assert len(moody.bodies) == len(moods) + 1
    assert len(set(moody.bodies)) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 422])
async def test_a_refusal_is_final(moody: Moody, status: int) -> None:
    moody.moods = [str(status)]
    async with CoordinatorClient(moody.url, "t") as client:
        with pytest.raises(CoordinatorError, match=f"{status}: told to") as refusal:
            await client.renew(RENEW)
    assert refusal.value.status == status
    assert len(moody.bodies) == 1


async def test_tries_end_after_the_time_given(moody: Moody) -> None:
    moody.moods = ["503"] * 1000
    async with CoordinatorClient(moody.url, "t", retry_for_s=0.4) as client:
        with pytest.raises(CoordinatorUnavailableError, match="status 503: told to"):
            await client.renew(RENEW)
    assert 2 <= len(moody.bodies) < 20


async def test_a_reply_of_another_program_version_is_an_error_not_a_guess(moody: Moody) -> None:
    moody.moods = ["nonsense"]
    async with CoordinatorClient(moody.url, "t") as client:
        with pytest.raises(CoordinatorError, match="does not fit this version"):
            await client.renew(RENEW)


async def test_a_client_can_be_used_again_after_closing(moody: Moody) -> None:
    client = CoordinatorClient(moody.url + "/", "t")
    await client.renew(RENEW)
    await client.aclose()
    await client.aclose()
    await client.renew(RENEW)
    await client.aclose()


def test_the_client_imports_neither_torch_nor_an_engine() -> None:
    import subprocess
    import sys

    code = (
        "import sys, inflight_runtime.coordinator.client, inflight_runtime.coordinator.__main__; "
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_long_polls_are_bounded() -> None:
    with pytest.raises(ValueError, match="less than or equal to 30"):
        LeaseRequest(actor_id="a", request_id="r", max_groups=1, wait_seconds=31)
