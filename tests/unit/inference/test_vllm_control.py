"""The line between the API process and a worker, over a real socket."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.inference.vllm_plugin.control import ControlClient, ControlError, ControlServer

DEADLINE_S = 10.0


async def connected(**calls: Any) -> ControlClient:
    return await ControlClient.connect(ControlServer(calls).path)


async def test_calls_get_their_own_answers_whatever_their_order() -> None:
    gate = threading.Event()

    def slow(word: str) -> str:
        assert gate.wait(DEADLINE_S)
        return word.upper()

    client = await connected(slow=slow, quick=lambda number: number + 1)
    waiting = [asyncio.create_task(client.call("slow", word=word)) for word in ("a", "b")]
    async with asyncio.timeout(DEADLINE_S):
        assert await client.call("quick", number=1) == 2  # not behind the slow ones
        gate.set()
        assert await asyncio.gather(*waiting) == ["A", "B"]


async def test_an_error_arrives_in_the_workers_words() -> None:
    def fail() -> None:
        raise ValueError("no such weights")

    client = await connected(fail=fail)
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(2):
            with pytest.raises(ControlError, match="ValueError: no such weights"):
                await client.call("fail")
        with pytest.raises(ControlError, match="KeyError"):
            await client.call("unknown")


async def test_a_call_that_is_given_up_does_not_disturb_the_next() -> None:
    gate = threading.Event()
    client = await connected(hang=lambda: gate.wait(DEADLINE_S), quick=lambda: 7)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.call("hang")
    gate.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await client.call("quick") == 7


async def test_what_a_worker_reports_by_itself_keeps_the_promise_of_that_name_and_no_other() -> None:
    server = ControlServer({"quick": lambda: 1})
    client = await ControlClient.connect(server.path)
    async with asyncio.timeout(DEADLINE_S):
        assert await client.call("quick") == 1
        with client.promise("commit 1") as first, client.promise("commit 2") as second:
            server.report("commit 2", 2.5)
            assert await second == 2.5
            assert not first.done()
        server.report("commit 1", 0.5)  # nobody waits any more
        assert await client.call("quick") == 1
    assert first.cancelled()


async def test_a_report_before_anybody_has_connected_is_no_failure() -> None:
    ControlServer({}).report("commit 1", 1.0)


async def test_large_arguments_pass() -> None:
    client = await connected(length=lambda text: len(text))  # noqa: PLW0108  len takes no keyword
    async with asyncio.timeout(DEADLINE_S):
        assert await client.call("length", text="x" * 5_000_000) == 5_000_000


async def test_nobody_else_can_connect_and_nothing_is_left_on_disk() -> None:
    server = ControlServer({"quick": lambda: 1})
    assert Path(server.path).parent.stat().st_mode & 0o077 == 0
    client = await ControlClient.connect(server.path)
    async with asyncio.timeout(DEADLINE_S):
        await client.call("quick")
    assert not Path(server.path).parent.exists()
    with pytest.raises(OSError, match="No such file"):
        await ControlClient.connect(server.path)


async def test_a_worker_that_is_gone_fails_what_waits_and_what_comes() -> None:
    gate = threading.Event()
    client = await connected(hang=lambda: gate.wait(DEADLINE_S))
    waiting = asyncio.create_task(client.call("hang"))
    await asyncio.sleep(0)
    client._writer.close()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ControlError, match="gone"):
            await waiting
        with pytest.raises(ControlError, match="gone"):
            await client.call("hang")
        with client.promise("commit 1") as promised, pytest.raises(ControlError, match="gone"):
            await promised
    gate.set()
