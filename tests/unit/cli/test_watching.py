"""Objects are kept up to date over cut links; logs are followed without a line lost or doubled."""

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import pytest
from rich.console import Console

from inflight_runtime.cluster import logs, watching
from inflight_runtime.cluster.connection import PODS, Connection, RefusedError, UnreachableError
from inflight_runtime.cluster.logs import Following, Request, show_once
from inflight_runtime.cluster.pods import containers
from inflight_runtime.cluster.watching import moments, ticking
from inflight_runtime.terminal import PrefixedLines
from support.api_server import FakeConnection, event, refused, thing

CUT = UnreachableError("cut")
DEADLINE_S = 10


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(logs, "AGAIN_S", 0.01)
    monkeypatch.setattr(logs, "IDLE_S", 0.05)


def connection(lists: list[Any], watches: list[Any]) -> tuple[FakeConnection, Connection]:
    fake = FakeConnection(lists, watches)
    return fake, cast(Connection, fake)


async def seen(source: AsyncGenerator[dict[str, Any], None], count: int) -> list[list[str]]:
    found = []
    async with asyncio.timeout(DEADLINE_S), aclosing(source) as moments_:
        async for one in moments_:
            found.append(
                sorted(f"{key.partition('/')[2]}{obj['metadata']['resourceVersion']}" for key, obj in one.items())
            )
            if len(found) == count:
                return found
    return found


async def test_changes_follow_the_list_and_a_watch_that_ends_goes_on_where_it_was() -> None:
    first = [event("ADDED", thing("b", 2)), event("BOOKMARK", thing("", 7))]
    second = [event("MODIFIED", thing("a", 8)), event("DELETED", thing("b", 9))]
    fake, real = connection([[thing("a", 1)]], [first, second])
    assert await seen(moments(real, PODS, {"labelSelector": "x"}, pytest.fail), 4) == [
        ["a1"],
        ["a1", "b2"],
        ["a8", "b2"],
        ["a8"],
    ]
    assert [query["resourceVersion"] for query in fake.asked] == ["1", "7"]
    assert fake.asked[0]["labelSelector"] == "x"


async def test_what_was_missed_while_the_link_was_cut_is_found_by_a_new_list() -> None:
    told: list[str] = []
    lists = [[thing("a", 1), thing("b", 1)], CUT, [thing("a", 5)]]
    _, real = connection(lists, [[CUT]])
    assert await seen(moments(real, PODS, {}, told.append), 2) == [["a1", "b1"], ["a5"]]
    assert told == ["cut; trying again", "the API server answers again"]


async def test_a_version_that_is_too_old_is_nobodys_trouble_to_hear_of() -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
    _, real = connection([[thing("a", 1)], [thing("a", 5)]], [[gone]])
    told: list[str] = []
    assert await seen(moments(real, PODS, {}, told.append), 2) == [["a1"], ["a5"]]
    assert not any("trying again" in one for one in told)


async def test_a_refusal_and_an_api_server_that_is_gone_for_long_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, real = connection([refused(403, "forbidden")], [])
    with pytest.raises(RefusedError, match="forbidden"):
        await seen(moments(real, PODS, {}, print), 1)
    monkeypatch.setattr(watching, "GIVE_UP_S", 0.05)
    _, real = connection([CUT], [])
    with pytest.raises(UnreachableError):
        await seen(moments(real, PODS, {}, print), 1)


async def test_the_newest_moment_comes_again_while_there_is_no_news() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(3600)
        finally:
            closed.set()

    found = []
    async with asyncio.timeout(DEADLINE_S), aclosing(ticking(source(), 0.01)) as ticks:
        async for one in ticks:
            found.append(one)
            if len(found) == 3:
                break
    assert found == [1, 1, 1]
    assert closed.is_set()


def pod(name: str, running: bool = True) -> dict[str, Any]:
    one = thing(name, 1)
    one["metadata"]["labels"] = {"inflight.dev/role": "actor"}
    one["spec"] = {"containers": [{"name": "actor"}]}
    state = {"running": {}} if running else {"terminated": {"exitCode": 0}}
    one["status"] = {"containerStatuses": [{"name": "actor", "restartCount": 0, "state": state}]}
    return one


def job(phase: str) -> dict[str, Any]:
    return thing("x", 1, status={"phase": phase})


def stamped(second: int, text: str) -> bytes:
    return f"2026-05-01T12:00:{second:02}.{second:09}Z {text}".encode()


class Lines(PrefixedLines):
    """Lines that can be waited for."""

    def __init__(self, file: io.StringIO) -> None:
        super().__init__(Console(file=file))
        self._file = file
        self._more = asyncio.Event()

    def line(self, source: str, text: str) -> None:
        super().line(source, text)
        self._more.set()

    async def has(self, text: str) -> None:
        while text not in self._file.getvalue():
            self._more.clear()
            await self._more.wait()


def output() -> tuple[Lines, io.StringIO]:
    file = io.StringIO()
    return Lines(file), file


async def test_a_log_that_is_cut_off_goes_on_after_its_last_line_and_a_pod_that_comes_later_is_shown_whole() -> None:
    over = [event("MODIFIED", pod("x-actor-a", running=False)), event("ADDED", pod("x-actor-b", running=False))]
    fake, real = connection([[pod("x-actor-a")]], [])
    fake.logs["x-actor-a"] = [
        [stamped(1, "one"), stamped(2, "two"), CUT],
        [stamped(2, "two"), stamped(3, "three\x1b[31m red"), None],
    ]
    fake.logs["x-actor-b"] = [[stamped(4, "other")]]
    fake.objects["x"] = job("Running")
    out, file = output()
    following = asyncio.create_task(Following(real, Request("x", tail=5), out, pytest.fail).run())
    async with asyncio.timeout(DEADLINE_S):
        await out.has("three")
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert file.getvalue().splitlines() == [
        "x-actor-a | one",
        "x-actor-a | two",
        "x-actor-a | three red",
    ]
    asked = [query for query in fake.asked if "follow" in query]
    assert asked[0] == {"timestamps": "true", "follow": "true", "tailLines": "5", "container": "actor"}
    assert asked[1]["sinceTime"].startswith("2026-05-01T12:00:02")
    assert "tailLines" not in asked[1]

    fake, real = connection([[pod("x-actor-a", running=False)]], [over])
    fake.logs = {"x-actor-a": [[stamped(1, "one")]], "x-actor-b": [[stamped(4, "other")]]}
    fake.objects["x"] = job("Succeeded")
    out, file = output()
    async with asyncio.timeout(DEADLINE_S):
        await Following(real, Request("x", tail=5), out, pytest.fail).run()  # of itself: the job is over
    assert sorted(file.getvalue().splitlines()) == ["x-actor-a | one", "x-actor-b | other"]
    assert "tailLines" not in fake.asked[-1]


async def test_a_job_that_is_deleted_ends_it_and_no_more_logs_are_followed_than_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MOST_FOLLOWED", 1)
    pods = [pod("x-actor-a", running=False), pod("x-actor-b", running=False)]
    fake, real = connection([pods], [])
    fake.logs = {"x-actor-a": [[stamped(1, "one")]]}
    told: list[str] = []
    out, file = output()
    async with asyncio.timeout(DEADLINE_S):
        await Following(real, Request("x"), out, told.append).run()
    assert file.getvalue() == "x-actor-a | one\n"
    assert told == ["x-actor-b: not followed, 1 logs are; name a role or a pod", "x was deleted"]


async def test_logs_as_they_are_come_in_the_order_of_time_and_one_that_cannot_be_read_keeps_no_other() -> None:
    fake, real = connection([], [])
    fake.logs = {
        "x-actor-a": [[stamped(1, "one"), stamped(4, "four"), b"the rest of four"]],
        "x-actor-b": [[stamped(2, "two"), stamped(5, "five")]],
        "x-actor-c": [[refused(404, "pods x-actor-c not found")]],
    }
    pods = containers([pod(name) for name in fake.logs])
    told: list[str] = []
    out, file = output()
    assert await show_once(real, Request("x", tail=10), pods, out, told.append) == 0
    assert file.getvalue().splitlines() == [
        "x-actor-a | one",
        "x-actor-b | two",
        "x-actor-a | four",
        "x-actor-a | the rest of four",
        "x-actor-b | five",
    ]
    assert told == ["x-actor-c: pods x-actor-c not found"]
    assert await show_once(real, Request("x", tail=10, previous=True), pods, out, told.append) == 1
    assert told[1].startswith("no container has been started again")
