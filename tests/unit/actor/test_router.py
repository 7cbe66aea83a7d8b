"""The router against stub servers over real HTTP: retries, restarts, aborted answers, waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from inflight_runtime.actor.metrics import ActorMetrics
from inflight_runtime.actor.router import (
    GenerationError,
    GenerationRefusedError,
    NoServerError,
    Route,
    Router,
)
from inflight_runtime.protocol import GenerateRequest, MembersReply, VersionField
from inflight_runtime.types import Version
from support.actor_fakes import StubServer, answer_ids, make_completion, running, snapshot

ANY = Version(0, 0)


class Membership:
    """A members source that a test moves."""

    def __init__(self) -> None:
        self.reply = snapshot()
        self.changed = asyncio.Event()
        self.given = -1
        """Revision that the router has taken over: it asks again only then."""

    def set(self, *members) -> None:
        self.reply = snapshot(*members, revision=self.reply.revision + 1)
        self.changed.set()

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        self.given = revision
        while self.reply.revision <= revision:
            self.changed.clear()
            await self.changed.wait()
        return self.reply


@pytest.fixture
def membership():
    return Membership()


@contextlib.asynccontextmanager
async def routing(membership, **options):
    settings = {"timeout_s": 10.0, "retries": 3, "wait_for_server_s": 10.0} | options
    router = Router(membership, StubServer().token, ActorMetrics(), **settings)
    await router.start()
    try:
        yield router
    finally:
        await router.close()


def request(n: int = 2) -> GenerateRequest:
    return GenerateRequest(prompt_ids=[1, 2, 3], n=n, max_tokens=6, seeds=list(range(n)))


async def test_answers_come_in_the_order_of_the_seeds_with_the_server_that_gave_them(membership):
    server = StubServer()
    async with running(server), routing(membership) as router:
        membership.set(server.member())
        answers = await router.generate(request(3), Route(ANY))
    assert [answer.completion.ids for answer in answers] == [answer_ids(seed, 6) for seed in range(3)]
    assert {(answer.server_id, answer.boot_id) for answer in answers} == {("s0", "b0")}


async def test_a_dead_server_costs_a_retry_and_not_the_request(membership):
    dead, alive = StubServer("dead"), StubServer("alive")
    async with running(dead, alive), routing(membership) as router:
        membership.set(dead.member(capacity=100), alive.member(capacity=1))
        await dead.stop()
        answers = await router.generate(request(), Route(ANY))
        assert {answer.server_id for answer in answers} == {"alive"}


async def test_the_turns_of_a_group_stay_on_one_server_until_it_fails(membership):
    first, second = StubServer("s0"), StubServer("s1")
    async with running(first, second), routing(membership) as router:
        membership.set(first.member(), second.member())
        route = Route(ANY)
        for _ in range(5):
            await router.generate(request(), route)
        assert sorted([len(first.requests), len(second.requests)]) == [0, 5]
        used, other = (first, second) if first.requests else (second, first)
        await used.stop()
        await router.generate(request(), route)
        assert len(other.requests) == 1
        await router.generate(request(), route)
        assert len(other.requests) == 2


async def test_groups_spread_over_servers_while_requests_are_in_flight(membership):
    servers = [StubServer(f"s{number}") for number in range(2)]
    gate = asyncio.Event()

    async def wait(_):
        await gate.wait()

    for server in servers:
        server.behave = wait
    async with running(*servers), routing(membership) as router:
        membership.set(*(server.member() for server in servers))
        tasks = [asyncio.create_task(router.generate(request(), Route(ANY))) for _ in range(8)]
        async with asyncio.timeout(20):
            while sum(len(server.requests) for server in servers) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*tasks)
    assert [len(server.requests) for server in servers] == [4, 4]


async def test_503_is_retried_elsewhere_and_400_is_final(membership):
    busy, good = StubServer("busy"), StubServer("good")

    async def unavailable(_):
        return web.json_response({"error": "loading"}, status=503)

    async def refuse(_):
        return web.json_response({"error": "max_tokens is over the model's length"}, status=400)

    busy.behave = unavailable
    async with running(busy, good), routing(membership) as router:
        membership.set(busy.member(capacity=100), good.member(capacity=1))
        answers = await router.generate(request(), Route(ANY))
        assert {answer.server_id for answer in answers} == {"good"}
        busy.behave = good.behave = refuse
        before = len(busy.requests) + len(good.requests)
        with pytest.raises(GenerationRefusedError, match="over the model's length"):
            await router.generate(request(), Route(ANY))
        assert len(busy.requests) + len(good.requests) == before + 1


async def test_only_the_answers_that_were_aborted_are_asked_for_again(membership):
    first, second = StubServer("s0"), StubServer("s1")

    async def half(body):
        seeds = body.seeds or []
        completions = [
            make_completion(answer_ids(seed, 6)) if seed % 2 == 0 else make_completion([97], finish="abort")
            for seed in seeds
        ]
        return first.reply(completions)

    first.behave = half
    async with running(first, second), routing(membership) as router:
        membership.set(first.member(capacity=100), second.member(capacity=1))
        answers = await router.generate(request(4), Route(ANY))
    assert [answer.completion.ids for answer in answers] == [answer_ids(seed, 6) for seed in range(4)]
    assert [answer.server_id for answer in answers] == ["s0", "s1", "s0", "s1"]
    assert second.requests[0].seeds == [1, 3]


async def test_retries_end_after_a_bound_with_the_reason(membership):
    server = StubServer()

    async def broken(_):
        return web.json_response({"error": "the engine has died"}, status=500)

    server.behave = broken
    async with running(server), routing(membership, retries=1) as router:
        membership.set(server.member())
        with pytest.raises(GenerationError, match=r"no answer after 2 tries.*the engine has died"):
            await router.generate(request(), Route(ANY))
    assert len(server.requests) == 2


async def test_a_request_waits_for_a_server_to_become_ready(membership):
    server = StubServer()
    async with running(server), routing(membership) as router:
        membership.set(server.member(state="SYNCING"))
        task = asyncio.create_task(router.generate(request(), Route(ANY)))
        await asyncio.sleep(0.05)
        assert not task.done()
        membership.set(server.member())
        assert len(await task) == 2


async def test_waiting_for_a_server_ends_with_the_state_of_each(membership):
    server = StubServer()
    async with running(server), routing(membership, wait_for_server_s=0.3) as router:
        membership.set(server.member(state="EVICTED", reason="no heartbeat for 5 s"))
        with pytest.raises(NoServerError, match=r"s0: EVICTED \(no heartbeat for 5 s\)"):
            await router.generate(request(), Route(ANY))


async def test_a_lease_for_new_weights_waits_for_a_server_that_has_them(membership):
    server = StubServer(version=VersionField(epoch=1, step=4))
    async with running(server), routing(membership) as router:
        membership.set(server.member(version=VersionField(epoch=1, step=3)))
        task = asyncio.create_task(router.generate(request(), Route(Version(1, 4))))
        await asyncio.sleep(0.05)
        assert server.requests == []
        membership.set(server.member())
        assert len(await task) == 2


async def test_answers_under_older_weights_than_the_lease_asks_for_are_not_used(membership):
    stale, fresh = StubServer("stale"), StubServer("fresh", version=VersionField(epoch=1, step=4))
    async with running(stale, fresh), routing(membership) as router:
        # The coordinator's view of the first is ahead of what it really serves.
        membership.set(
            stale.member(version=VersionField(epoch=1, step=4), capacity=100),
            fresh.member(capacity=1),
        )
        answers = await router.generate(request(), Route(Version(1, 4)))
    assert {answer.server_id for answer in answers} == {"fresh"}


async def test_answers_of_a_process_that_took_over_the_address_are_not_used(membership):
    restarted, other = StubServer("s0", boot_id="b1"), StubServer("s1")
    async with running(restarted, other), routing(membership) as router:
        membership.set(restarted.member(boot_id="b0", capacity=100), other.member(capacity=1))
        answers = await router.generate(request(), Route(ANY))
    assert len(restarted.requests) == 1
    assert {answer.server_id for answer in answers} == {"s1"}


async def test_an_answer_whose_spans_do_not_tile_it_is_not_used(membership):
    bad, good = StubServer("bad"), StubServer("good")

    async def gap(body):
        completion = make_completion([97, 98, 99])
        completion.spans[0].end = 2
        return bad.reply([completion] * body.n)

    bad.behave = gap
    async with running(bad, good), routing(membership) as router:
        membership.set(bad.member(capacity=100), good.member(capacity=1))
        answers = await router.generate(request(), Route(ANY))
    assert {answer.server_id for answer in answers} == {"good"}


@pytest.mark.parametrize("gone", ["evicted and silent", "restarted"])
async def test_a_server_that_stopped_answering_does_not_hold_its_requests_up(membership, gone):
    stopped, other = StubServer("s0"), StubServer("s1")
    never = asyncio.Event()

    async def hang(_):
        await never.wait()

    stopped.behave = hang
    async with running(stopped, other), routing(membership, timeout_s=600.0) as router:
        membership.set(stopped.member(capacity=100), other.member(capacity=1))
        task = asyncio.create_task(router.generate(request(), Route(ANY)))
        async with asyncio.timeout(20):
            while not stopped.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if gone == "restarted":
            membership.set(stopped.member(boot_id="b1", state="JOINING"), other.member())
        else:
            membership.set(stopped.member(state="EVICTED", seconds_since_beat=6.0), other.member())
        async with asyncio.timeout(20):
            answers = await task
        assert {answer.server_id for answer in answers} == {"s1"}
        never.set()


@pytest.mark.parametrize("change", ["evicted for a late update", "missing after the coordinator has restarted"])
async def test_a_server_that_still_lives_may_finish_what_it_has_begun(membership, change):
    server = StubServer()
    gate = asyncio.Event()

    async def wait(_):
        await gate.wait()

    server.behave = wait
    async with running(server), routing(membership) as router:
        membership.set(server.member())
        task = asyncio.create_task(router.generate(request(), Route(ANY)))
        async with asyncio.timeout(20):
            while not server.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if change.startswith("evicted"):
            membership.set(server.member(state="EVICTED", reason="missed the update deadline", seconds_since_beat=0.4))
        else:
            membership.set()
        revision = membership.reply.revision
        async with asyncio.timeout(20):
            while membership.given < revision:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        gate.set()
        assert len(await task) == 2
        assert len(server.requests) == 1


async def test_a_pooled_connection_that_the_server_has_closed_costs_nothing(membership):
    server = StubServer()
    async with running(server), routing(membership, retries=0) as router:
        membership.set(server.member())
        await router.generate(request(), Route(ANY))
        port = int(server.url.rsplit(":", 1)[1])
        await server.stop()
        await server.start(port)
        await router.generate(request(), Route(ANY))
    assert len(server.requests) == 2


async def test_the_circuit_of_a_dead_server_opens_and_closes_again(membership):
    server = StubServer()
    async with running(server), routing(membership, retries=6) as router:
        membership.set(server.member())
        port = int(server.url.rsplit(":", 1)[1])
        await server.stop()
        task = asyncio.create_task(router.generate(request(), Route(ANY)))
        async with asyncio.timeout(20):
            while not (router.servers and router._record(router.servers[0].key).breaker.open_until):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await server.start(port)
        assert len(await task) == 2
        assert router._record(router.servers[0].key).breaker.open_until is None
