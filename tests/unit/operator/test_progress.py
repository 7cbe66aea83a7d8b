"""How far runs are: a real HTTP client against coordinators that answer, hang, lie and go away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator.kube import KubeError
from inflight_operator.progress import ProgressReader, Reading
from inflight_operator.run_state import LARGEST_COUNT, UnreadableError, understand
from inflight_runtime.api.status import PolicyVersion
from inflight_runtime.protocol import RunState, VersionField
from support.virtual_time import run_in_virtual_time

DEADLINE_S = 20.0
JOB = "team/letters"
TOKEN = "a-good-token"
Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


def state(step: int = 7, **changes: Any) -> dict[str, Any]:
    """As the coordinator writes it, with the trainer's names of the numbers."""
    full = RunState(
        job="letters",
        outcome="running",
        epoch=2,
        step=step,
        steps=50,
        policy_version=VersionField(epoch=2, step=step),
        groups={"submitted": 90, "leased": 3, "completed": 1, "assigned": 2, "trained": 80, "dropped": 4},
        dropped={"attempts_failed": 4},
        attempts_failed=9,
        duplicates=0,
        fenced=0,
        leases_expired=1,
        capacity={"outstanding": 6, "bound": 10, "leased": 3, "cap": 8},
        metrics={"reward_mean": 1 / 3, "staleness_mean": 0.25, "tokens_per_second": 1234.5678, "loss": 0.1},
        checkpoint_step=5,
    )
    return {**full.model_dump(mode="json"), **changes}


class Coordinator:
    """Answers ``/v1/state`` as told, to the bearer of the token."""

    def __init__(self) -> None:
        self.url = ""
        self.token = TOKEN
        self.respond: Respond = self.good
        self.state = state()
        self.asked = 0
        self.at_once = 0
        self.most_at_once = 0
        self.more = asyncio.Condition()

    async def good(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self.state)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            async with self.more:
                self.asked += 1
                self.more.notify_all()
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                return web.json_response({"error": "no"}, status=401)
            return await self.respond(request)
        finally:
            self.at_once -= 1

    async def wait_for(self, asked: int) -> None:
        async with self.more:
            await self.more.wait_for(lambda: self.asked >= asked)


@contextlib.asynccontextmanager
async def serving(*coordinators: Coordinator) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        for coordinator in coordinators:
            app = web.Application()
            app.router.add_get("/v1/state", coordinator.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            coordinator.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield


class Tokens:
    """The token function, and what it was asked."""

    def __init__(self, *tokens: str | Exception) -> None:
        self.left = deque(tokens or (TOKEN,))
        self.asked: list[tuple[str, str, bool]] = []

    async def __call__(self, namespace: str, name: str, fresh: bool) -> str:
        self.asked.append((namespace, name, fresh))
        token = self.left[0] if len(self.left) == 1 else self.left.popleft()
        if isinstance(token, Exception):
            raise token
        return token


@contextlib.asynccontextmanager
async def reading(
    tokens: Tokens | None = None, *, period_s: float = 0.01, **options: Any
) -> AsyncIterator[tuple[ProgressReader, asyncio.Queue[str]]]:
    changes: asyncio.Queue[str] = asyncio.Queue()
    reader = ProgressReader(tokens or Tokens(), changes.put_nowait, period_s=period_s, **options)
    running = asyncio.create_task(reader.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, changes
    finally:
        running.cancel()
        await asyncio.wait({running})


def known(reader: ProgressReader, key: str = JOB) -> Reading:
    found = reader.latest(key)
    assert found is not None
    return found


async def test_numbers_come_from_where_the_coordinator_has_them() -> None:
    coordinator = Coordinator()
    async with serving(coordinator), reading() as (reader, changes):
        assert reader.latest(JOB) is None
        reader.follow(JOB, coordinator.url + "/")
        assert await changes.get() == JOB
        found = known(reader)
    assert (found.outcome, found.reason, found.error) == ("running", "", "")
    assert found.progress is not None
    assert found.progress.model_dump(exclude={"updated_time"}) == {
        "step": 7,
        "steps": 50,
        "policy_version": PolicyVersion(epoch=2, step=7).model_dump(),
        "reward_mean": 0.333333,
        "staleness_mean": 0.25,
        "tokens_per_second": 1234.57,
        "groups_trained": 80,
        "groups_dropped": 4,
        "checkpoint_step": 5,
    }
    assert len(found.progress.updated_time) == len("2026-11-30T03:00:00Z")


async def test_what_stays_the_same_is_told_once_and_keeps_its_time() -> None:
    coordinator = Coordinator()
    async with serving(coordinator), reading() as (reader, changes):
        reader.follow(JOB, coordinator.url)
        await changes.get()
        first = known(reader).progress
        for _ in range(3):
            reader.follow(JOB, coordinator.url)
        coordinator.state = {**coordinator.state, "seconds": 99.0, "actors": 3}
        await coordinator.wait_for(6)
        assert changes.empty()
        assert known(reader).progress is first
        coordinator.state = state(8)
        await changes.get()
        assert known(reader).progress is not first
        coordinator.state = state(8, outcome="failed", reason="the loss was not finite")
        await changes.get()
        assert (known(reader).outcome, known(reader).reason) == ("failed", "the loss was not finite")
        await coordinator.wait_for(coordinator.asked + 3)
        assert changes.empty()


async def test_a_coordinator_that_went_away_keeps_its_last_numbers_and_comes_back() -> None:
    coordinator = Coordinator()

    async def broken(_: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text=f"number {coordinator.asked}")

    async with serving(coordinator), reading(longest_pause_s=0.02) as (reader, changes):
        reader.follow(JOB, coordinator.url)
        await changes.get()
        good = known(reader)
        coordinator.respond = broken
        await changes.get()
        assert known(reader) == Reading(good.progress, "running", "", "the coordinator answers with HTTP status 500")
        await coordinator.wait_for(coordinator.asked + 5)
        assert changes.empty()
        coordinator.respond = coordinator.good
        await changes.get()
        assert known(reader) == good


async def test_one_late_answer_is_no_news_and_two_in_a_row_are() -> None:
    coordinator = Coordinator()

    async def late_once(_: web.Request) -> web.StreamResponse:
        coordinator.respond = coordinator.good
        return await _never(_)

    async with serving(coordinator), reading(deadline_s=0.3, longest_pause_s=0.02) as (reader, changes):
        reader.follow(JOB, coordinator.url)
        await changes.get()
        good = known(reader)
        for _ in range(2):
            coordinator.respond = late_once
            await coordinator.wait_for(coordinator.asked + 4)
        assert changes.empty()
        assert known(reader) == good
        coordinator.respond = _never
        await changes.get()
        assert known(reader).error == "no answer within 0.3 s"


async def test_a_refused_token_is_read_anew_once() -> None:
    coordinator = Coordinator()
    tokens = Tokens("an-old-token", TOKEN)
    async with serving(coordinator), reading(tokens) as (reader, _):
        assert (await reader.read_now(JOB, coordinator.url)).error == ""
        assert tokens.asked == [("team", "letters", False), ("team", "letters", True)]
        coordinator.token = "changed"
        before = coordinator.asked
        assert (await reader.read_now(JOB, coordinator.url)).error == "the coordinator refuses the job's token"
        assert coordinator.asked == before + 1
        tokens.left = deque(["one", "two"])
        assert (await reader.read_now(JOB, coordinator.url)).error == "the coordinator refuses the job's token"
        assert coordinator.asked == before + 3


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (
            KubeError(404, "NotFound", 'secrets "letters-token" not found'),
            'NotFound: secrets "letters-token" not found',
        ),
        (KubeError(0, "Unreachable", "GET /api at 12:01:07"), "the API server does not answer"),
        (KubeError(503, "ServiceUnavailable", "request 8f2e"), "ServiceUnavailable"),
        (LookupError("the Secret has no key token"), "LookupError: the Secret has no key token"),
        (TimeoutError(), "could not be read in time"),
        ("", "is empty or has characters"),
        ("two\r\nX-Header: lines", "is empty or has characters"),
    ],
)
async def test_a_token_that_cannot_be_had_is_an_error_in_words(token: str | Exception, words: str) -> None:
    coordinator = Coordinator()
    async with serving(coordinator), reading(Tokens(token)) as (reader, _):
        found = await reader.read_now(JOB, coordinator.url)
    assert found.progress is None
    assert words in found.error
    assert coordinator.asked == 0


async def _answer_with(body: bytes, status: int = 200, **headers: str) -> web.StreamResponse:
    return web.Response(body=body, status=status, headers=headers)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"\xff\xfe\x00\xd8", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"step": ' + b"9" * 6000 + b"}", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"step": "7"}', "which step"),
        (b'{"step": true}', "which step"),
        (b'{"step": -1}', "which step"),
        (b'{"step": 99999999999999999999}', "which step"),
        (b'{"error": "no"}', "which step"),
        (b" " * 1_000_001, "more than 1000000 bytes"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
async def test_an_answer_that_makes_no_sense_is_an_error_in_words(body: bytes, words: str) -> None:
    coordinator = Coordinator()
    coordinator.respond = lambda _: _answer_with(body)
    async with serving(coordinator), reading() as (reader, _):
        found = await reader.read_now(JOB, coordinator.url)
    assert found.progress is None
    assert words in found.error


async def test_a_redirect_is_not_followed() -> None:
    coordinator, other = Coordinator(), Coordinator()
    async with serving(coordinator, other), reading() as (reader, _):
        coordinator.respond = lambda _: _answer_with(b"", 307, Location=f"{other.url}/v1/state")
        assert "status 307" in (await reader.read_now(JOB, coordinator.url)).error
    assert other.asked == 0


async def test_a_compressed_bomb_is_not_unpacked() -> None:
    coordinator = Coordinator()
    coordinator.respond = lambda _: _answer_with(b"\x1f\x8b" + b"0" * 100, **{"Content-Encoding": "gzip"})
    async with serving(coordinator), reading() as (reader, _):
        assert "not JSON" in (await reader.read_now(JOB, coordinator.url)).error


async def _never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _endless(request: web.Request, chunk: bytes, pause_s: float) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(chunk)
            await asyncio.sleep(pause_s)
    return response


async def test_an_answer_that_does_not_come_or_never_ends_is_cut_off() -> None:
    coordinator = Coordinator()
    async with serving(coordinator), reading(deadline_s=0.3) as (reader, _):
        coordinator.respond = _never
        assert (await reader.read_now(JOB, coordinator.url)).error == "no answer within 0.3 s"
        coordinator.respond = lambda request: _endless(request, b" ", 0.01)
        assert (await reader.read_now(JOB, coordinator.url)).error == "no answer within 0.3 s"
    async with serving(coordinator), reading(deadline_s=DEADLINE_S) as (reader, _):
        coordinator.respond = lambda request: _endless(request, b" " * 65536, 0.0)
        assert "more than" in (await reader.read_now(JOB, coordinator.url)).error


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "the connection was closed before the answer was complete"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
            "the connection was closed before the answer was complete",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "what answers does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "what answers does not speak HTTP"),
    ],
    ids=["closed", "half", "garbage", "header"],
)
async def test_what_is_no_http_server_is_an_error_in_words(sent: bytes, words: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, reading() as (reader, _):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await reader.read_now(JOB, url)).error == words


async def test_an_address_where_nobody_is_and_one_that_is_none() -> None:
    coordinator = Coordinator()
    async with serving(coordinator):
        url = coordinator.url
    async with reading() as (reader, _):
        assert (await reader.read_now(JOB, url)).error == f"cannot connect to {url[7:]}: Connection refused"
        for bad in ("", "coordinator", "ftp://coordinator", "http://[", "http://host:99999"):
            found = await reader.read_now(JOB, bad)
            assert found.error, bad
            assert found == await reader.read_now(JOB, bad)


async def test_proxies_of_the_environment_are_not_for_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    coordinator = Coordinator()
    async with serving(coordinator), reading() as (reader, _):
        assert (await reader.read_now(JOB, coordinator.url)).error == ""


async def test_coordinators_that_hang_hold_up_no_other_and_a_bounded_number_is_asked_at_once() -> None:
    stuck, fine = Coordinator(), Coordinator()
    stuck.respond = _never
    async with serving(stuck, fine), reading(at_once=3, deadline_s=0.3) as (reader, changes):
        for number in range(8):
            reader.follow(f"team/stuck-{number}", stuck.url)
        reader.follow(JOB, fine.url)
        while await changes.get() != JOB:
            pass
        await fine.wait_for(5)
    assert stuck.most_at_once <= 3


async def test_an_older_answer_that_comes_later_is_no_news() -> None:
    coordinator = Coordinator()
    held = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        coordinator.respond = coordinator.good
        await held.wait()
        return web.json_response(state(1))

    coordinator.respond = slow
    async with serving(coordinator), reading(period_s=1000.0, deadline_s=DEADLINE_S) as (reader, changes):
        reader.follow(JOB, coordinator.url)
        await coordinator.wait_for(1)
        coordinator.state = state(50, outcome="succeeded")
        last = await reader.read_now(JOB, coordinator.url)
        assert last.outcome == "succeeded"
        assert changes.empty()
        held.set()
        await changes.get()
        assert known(reader) is last


async def test_a_forgotten_run_is_not_read_any_more_not_even_in_the_middle() -> None:
    coordinator, other = Coordinator(), Coordinator()
    held = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        await held.wait()
        return web.json_response(state())

    coordinator.respond = slow
    async with serving(coordinator, other), reading() as (reader, changes):
        reader.follow(JOB, coordinator.url)
        await coordinator.wait_for(1)
        reader.forget(JOB)
        held.set()
        reader.follow("team/other", other.url)
        await other.wait_for(5)
        assert reader.latest(JOB) is None
        assert coordinator.asked == 1
        reader.forget("team/other")
        assert {changes.get_nowait() for _ in range(changes.qsize())} == {"team/other"}


async def test_a_new_address_is_read_at_once() -> None:
    old, new = Coordinator(), Coordinator()
    old.respond = _never
    new.state = state(9)
    async with serving(old, new), reading(period_s=1000.0, deadline_s=1.0) as (reader, changes):
        reader.follow(JOB, old.url)
        await old.wait_for(1)
        reader.follow(JOB, new.url)
        await changes.get()
        found = known(reader)
        assert found.error == ""
        assert found.progress is not None
        assert found.progress.step == 9
    assert old.asked == 1


async def test_after_the_end_nothing_is_asked() -> None:
    coordinator = Coordinator()
    async with serving(coordinator):
        async with reading() as (reader, _):
            good = await reader.read_now(JOB, coordinator.url)
        last = await reader.read_now(JOB, coordinator.url)
    assert last == Reading(good.progress, "running", error="the operator is stopping")
    assert coordinator.asked == 1


def test_pauses_grow_while_a_run_cannot_be_read_and_are_short_again_afterwards() -> None:
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def token(namespace: str, name: str, fresh: bool) -> str:
            times.append(loop.time())
            raise KubeError(404, "NotFound", "no such Secret")

        reader = ProgressReader(token, lambda key: None)
        running = asyncio.create_task(reader.run())
        reader.follow(JOB, "http://a")
        await asyncio.sleep(200.0)
        reader.follow(JOB, "http://b")
        await asyncio.sleep(15.0)
        running.cancel()
        await asyncio.wait({running})

    run_in_virtual_time(main())
    pauses = [round(after - before, 2) for before, after in itertools.pairwise(times)]
    assert pauses == [10.0, 20.0, 40.0, 60.0, 60.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"metrics": {"reward_mean": float("nan")}}, "reward_mean", None),
        ({"metrics": {"reward_mean": float("-inf")}}, "reward_mean", None),
        ({"metrics": {"reward_mean": 10**400}}, "reward_mean", None),
        ({"metrics": {"reward_mean": "0.5"}}, "reward_mean", None),
        ({"metrics": {"reward_mean": True}}, "reward_mean", None),
        ({"metrics": {"reward_mean": 1}}, "reward_mean", 1.0),
        ({"metrics": {"tokens_per_second": -3.0}}, "tokens_per_second", None),
        ({"metrics": [1]}, "reward_mean", None),
        ({"metrics": None}, "staleness_mean", None),
        ({"groups": {"trained": 2**53}}, "groups_trained", None),
        ({"groups": "many"}, "groups_dropped", None),
        ({"policy_version": {"epoch": 1}}, "policy_version", None),
        ({"policy_version": None}, "policy_version", None),
        ({"checkpoint_step": None}, "checkpoint_step", None),
        ({"steps": 1.5}, "steps", 0),
        ({"a_new_field": [{}]}, "step", 7),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_left_out(changes: dict[str, Any], field: str, value: Any) -> None:
    found = understand(json.dumps(state(**changes)).encode()).progress
    assert found is not None
    assert getattr(found, field) == value
    assert found.step == 7


def test_numbers_beyond_all_bounds_are_left_out() -> None:
    found = understand(b'{"step": 1, "metrics": {"reward_mean": 1e999, "staleness_mean": -1e-999}}').progress
    assert found is not None
    assert found.reward_mean is None
    assert found.staleness_mean == 0.0


def test_texts_are_cut_and_cleaned() -> None:
    found = understand(json.dumps(state(outcome=3, reason="a\ud800\x1b[31m\nb\x00" + "c" * 10_000)).encode())
    assert found.outcome == ""
    assert found.reason.startswith("a  [31m\nb c")
    assert len(found.reason) == 4000
    found.reason.encode()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
_NAMES = ("step", "steps", "outcome", "reason", "groups", "metrics", "policy_version", "checkpoint_step")
_OBJECTS = st.dictionaries(st.sampled_from(["trained", "dropped", "reward_mean", "tokens_per_second", "epoch"]), _JSON)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, _JSON | _OBJECTS)) | _JSON, st.integers(0, 9))
def test_whatever_the_answer_is_the_status_can_carry_what_is_made_of_it(answer: Any, step: int) -> None:
    for body in (json.dumps(answer), json.dumps({"step": step, **answer} if isinstance(answer, dict) else [answer])):
        try:
            found = understand(body.encode())
        except UnreadableError:
            continue
        assert found.progress is not None
        text = json.dumps(found.progress.model_dump(by_alias=True), allow_nan=False) + found.outcome + found.reason
        text.encode()
        assert found.progress.step <= LARGEST_COUNT


@given(st.binary())
def test_bytes_of_any_kind_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(UnreadableError):
        understand(body)
