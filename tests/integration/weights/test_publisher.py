"""The publisher against real server processes over real pairs; only the coordinator is played here."""

import asyncio
import contextlib
import os
import signal
import time

import aiohttp
import pytest
import torch

from inflight_runtime.config.roles import WeightSyncConfig
from inflight_runtime.coordinator.client import FencedError
from inflight_runtime.protocol import Member, MembersReply, VersionField
from inflight_runtime.types import Version
from inflight_runtime.weights import link
from inflight_runtime.weights.errors import StaleEpochError
from inflight_runtime.weights.publisher import Publisher
from support import weight_peers as peer

DEADLINE_S = 60.0


class Coordinator:
    """The membership part of a coordinator."""

    def __init__(self):
        self.epoch = 1
        self.revision = 0
        self.members_by_id = {}
        self.told = []
        self.changed = asyncio.Condition()

    async def change(self):
        async with self.changed:
            self.revision += 1
            self.changed.notify_all()

    async def join(self, server, state="JOINING"):
        self.members_by_id[server.server_id] = Member(
            server_id=server.server_id,
            boot_id=server.boot_id,
            url=server.url,
            engine="test",
            world_size=1,
            capacity=1,
            max_length=1,
            state=state,
        )
        await self.change()

    async def leave(self, server_id):
        del self.members_by_id[server_id]
        await self.change()

    async def members(self, revision=-1, wait_seconds=0.0):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds), self.changed:
                await self.changed.wait_for(lambda: self.revision > revision)
        return MembersReply(
            revision=self.revision,
            epoch=self.epoch,
            policy_version=VersionField(epoch=self.epoch, step=0),
            finished=False,
            members=list(self.members_by_id.values()),
        )

    async def set_member_state(self, server_id, request):
        member = self.members_by_id.get(server_id)
        if request.epoch != self.epoch or member is None or member.boot_id != request.boot_id:
            raise FencedError(409, "not current")
        self.told.append((server_id, request.state, request.version and request.version.step, request.reason))
        self.members_by_id[server_id] = member.model_copy(update={"state": request.state, "version": request.version})
        await self.change()

    def states(self, server_id):
        return [(state, step) for name, state, step, _ in self.told if name == server_id]

    def reasons(self, server_id):
        return [reason for name, state, _, reason in self.told if name == server_id and state == "EVICTED"]


class Server:
    """A handle on a :class:`~support.weight_peers.SmallServer` process."""

    def __init__(self, server_id, process, boot_id, port, session):
        self.server_id = server_id
        self.process = process
        self.boot_id = boot_id
        self.url = f"http://127.0.0.1:{port}"
        self.session = session

    async def set(self, **faults):
        async with self.session.post(f"{self.url}/faults", json=faults) as reply:
            assert reply.status == 200

    async def seen(self):
        async with self.session.get(f"{self.url}/seen") as reply:
            return await reply.json()

    async def steps(self):
        return [step for _, step in (await self.seen())["history"]]


async def until(condition, what):
    """Poll a condition, plain or a coroutine function, until it holds."""
    give_up = time.monotonic() + DEADLINE_S
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert time.monotonic() < give_up, f"{what}: not within {DEADLINE_S:g} s"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(link, "FIRST_BACKOFF_S", 0.05)


@pytest.fixture
async def coordinator():
    return Coordinator()


@pytest.fixture
async def start_server(processes):
    """Starts server processes; ``start_server(id)`` returns a handle once it listens."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(server_id):
            here, there = processes.Pipe()
            process = stack.enter_context(peer.running(processes, peer.serve, server_id, there))
            assert await asyncio.to_thread(here.poll, peer.START_DEADLINE_S)
            return Server(server_id, process, *here.recv(), session)

        yield start


@pytest.fixture
async def log():
    return []


@pytest.fixture
async def publisher(coordinator, log):
    config = WeightSyncConfig(transport="gloo", deadline_s=30.0, bucket_bytes=peer.BUCKET_BYTES)
    async with Publisher(coordinator, epoch=1, token=peer.TOKEN, config=config, log=log.append) as publisher:
        yield publisher


async def delivered(publisher, step, servers=1):
    assert await publisher.wait_delivered(Version(1, step), servers=servers, timeout_s=DEADLINE_S)


async def test_every_server_gets_the_weights_and_is_told_ready(start_server, coordinator, publisher, log, monkeypatch):
    monkeypatch.setattr(link, "UPDATING_AFTER_S", DEADLINE_S)
    servers = [await start_server(name) for name in ("a", "b")]
    for server in servers:
        await coordinator.join(server)
    for step in (0, 1):
        data = peer.snapshot(step)
        await publisher.publish(data)
        await delivered(publisher, step, servers=2)
        for server in servers:
            assert (await server.seen())["digests"] == {spec.name: spec.digest for spec in data.specs}
    for server in servers:
        # An update that is over soon is not announced as UPDATING.
        assert coordinator.states(server.server_id) == [("SYNCING", None), ("READY", 0), ("READY", 1)]
        assert (await server.seen())["joins"] == 1
    assert len(log) == 4
    assert all(entry["ok"] and entry["skipped"] == 0 and entry["reason"] == "" for entry in log)
    assert {(entry["server"], entry["epoch"], entry["step"]) for entry in log} == {
        ("a", 1, 0),
        ("a", 1, 1),
        ("b", 1, 0),
        ("b", 1, 1),
    }
    assert log[0].keys() == {
        *("time", "server", "epoch", "step", "update_ms", "receive_ms", "pause_ms", "commit_ms"),
        *("ok", "reason", "skipped"),
    }
    assert (log[0]["receive_ms"], log[0]["pause_ms"], log[0]["commit_ms"]) == (1.0, 2.0, 3.0)


async def test_a_slow_server_does_not_delay_the_others_and_skips_what_it_missed(
    start_server, coordinator, publisher, log
):
    slow, fast = await start_server("slow"), await start_server("fast")
    await slow.set(hold=True)
    await coordinator.join(slow)
    await coordinator.join(fast)
    for step in range(4):
        await publisher.publish(peer.snapshot(step))
        await delivered(publisher, step)
    assert await fast.steps() == [0, 1, 2, 3]
    assert await slow.steps() == []
    await slow.set(hold=False)
    await delivered(publisher, 3, servers=2)
    assert await slow.steps() == [0, 3]
    assert publisher.skipped == 2
    assert [entry["skipped"] for entry in log if entry["server"] == "slow"] == [0, 2]


async def test_an_update_that_takes_its_time_is_announced_and_ready_comes_after_that(
    start_server, coordinator, publisher
):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    await server.set(hold=True)
    await publisher.publish(peer.snapshot(1))
    await until(lambda: ("UPDATING", None) in coordinator.states("a"), "the update is announced")
    await server.set(hold=False)
    await delivered(publisher, 1)
    assert coordinator.states("a") == [("SYNCING", None), ("READY", 0), ("UPDATING", None), ("READY", 1)]


async def test_a_late_joiner_gets_the_current_version_at_once(start_server, coordinator, publisher):
    early = await start_server("early")
    await coordinator.join(early)
    for step in (0, 1):
        await publisher.publish(peer.snapshot(step))
        await delivered(publisher, step)
    late = await start_server("late")
    await coordinator.join(late)
    await delivered(publisher, 1, servers=2)
    assert await late.steps() == [1]
    assert await early.steps() == [0, 1]
    assert publisher.skipped == 0


async def test_a_restarted_server_gets_a_new_pair_and_the_current_version(start_server, coordinator, publisher):
    first = await start_server("a")
    await coordinator.join(first)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    first.process.kill()
    second = await start_server("a")
    await coordinator.join(second)
    await until(lambda: coordinator.states("a") == 2 * [("SYNCING", None), ("READY", 0)], "ready again")
    assert (await second.seen())["history"] == [[1, 0]]
    assert second.boot_id in (await second.seen())["pairs"][0]


async def test_a_server_that_dies_in_a_transfer_is_evicted_and_the_other_goes_on(
    start_server, coordinator, publisher, log
):
    dying, well = await start_server("dying"), await start_server("well")
    await dying.set(die_in_receive=True)
    await coordinator.join(dying)
    await coordinator.join(well)
    await publisher.publish(peer.snapshot(0))
    await until(lambda: coordinator.reasons("dying"), "eviction")
    await delivered(publisher, 0)
    await publisher.publish(peer.snapshot(1))
    await delivered(publisher, 1)
    assert await well.steps() == [0, 1]
    failed = next(entry for entry in log if not entry["ok"])
    assert failed["server"] == "dying"
    assert failed["reason"]
    again = await start_server("dying")
    await coordinator.join(again)
    await delivered(publisher, 1, servers=2)


async def test_a_corrupted_byte_is_not_committed_and_the_next_attempt_works(start_server, coordinator, publisher):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    await server.set(corrupt=1)
    await publisher.publish(peer.snapshot(1))
    await until(lambda: coordinator.reasons("a"), "eviction")
    assert "did not arrive as sent (first: embed)" in coordinator.reasons("a")[0]
    await delivered(publisher, 1)
    seen = await server.seen()
    assert seen["history"] == [[1, 0], [1, 1]]
    assert seen["joins"] == 2
    assert seen["digests"] == {spec.name: spec.digest for spec in peer.snapshot(1).specs}


async def test_a_refusal_ends_the_send_at_once_and_names_its_reason(start_server, coordinator, publisher, log):
    server = await start_server("a")
    await server.set(refuse=1, refuse_join=1)
    await coordinator.join(server)
    begun = time.monotonic()
    await publisher.publish(peer.snapshot(0))
    await until(lambda: len(coordinator.reasons("a")) == 2, "evictions")
    first, second = coordinator.reasons("a")
    assert "this join is refused (HTTP 400)" in first
    assert "this update is refused (HTTP 400)" in second
    await delivered(publisher, 0)
    assert time.monotonic() - begun < publisher.config.deadline_s  # the sender was not left to its timeout
    assert [entry["ok"] for entry in log] == [False, False, True]


async def test_automatic_transport_falls_back_to_gloo_where_nccl_does_not_work(
    start_server, coordinator, log, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = await start_server("a")
    await server.set(refuse_join=1)
    await coordinator.join(server)
    config = WeightSyncConfig(transport="auto", bucket_bytes=peer.BUCKET_BYTES)
    async with Publisher(coordinator, epoch=1, token=peer.TOKEN, config=config, log=log.append) as publisher:
        await publisher.publish(peer.snapshot(0))
        await delivered(publisher, 0)
    assert (await server.seen())["backends"] == ["nccl", "gloo"]
    assert [entry["ok"] for entry in log] == [False, True]


async def test_a_lost_reply_is_settled_by_the_servers_status(start_server, coordinator, publisher, log):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    await server.set(lose=1)
    await publisher.publish(peer.snapshot(1))
    await delivered(publisher, 1)
    await publisher.publish(peer.snapshot(2))
    await delivered(publisher, 2)
    assert await server.steps() == [0, 1, 2]
    assert coordinator.reasons("a") == []
    assert all(entry["ok"] for entry in log)


async def test_a_server_that_hangs_is_evicted_at_its_deadline_and_comes_back(start_server, coordinator, log):
    config = WeightSyncConfig(transport="gloo", deadline_s=1.0, bucket_bytes=peer.BUCKET_BYTES)
    hung, well = await start_server("hung"), await start_server("well")
    await coordinator.join(hung)
    await coordinator.join(well)
    async with Publisher(coordinator, epoch=1, token=peer.TOKEN, config=config, log=log.append) as publisher:
        await publisher.publish(peer.snapshot(0))
        await delivered(publisher, 0, servers=2)
        os.kill(hung.process.pid, signal.SIGSTOP)
        try:
            for step in (1, 2):
                await publisher.publish(peer.snapshot(step))
                await delivered(publisher, step)
            await until(lambda: coordinator.reasons("hung"), "eviction")
            assert publisher.versions == {"hung": None, "well": Version(1, 2)}
        finally:
            os.kill(hung.process.pid, signal.SIGCONT)
        await delivered(publisher, 2, servers=2)
    assert (await hung.steps())[-1] == 2


async def test_a_broken_server_is_evicted_with_its_reason_and_sent_nothing(start_server, coordinator, publisher):
    server = await start_server("a")
    await server.set(broken="the commit failed half-way")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await until(lambda: coordinator.reasons("a"), "eviction")
    assert "broken until it restarts: the commit failed half-way" in coordinator.reasons("a")[0]
    seen = await server.seen()
    assert seen["history"] == []
    assert seen["joins"] == 0


async def test_a_server_the_coordinator_lost_sight_of_is_ready_again_without_a_second_send(
    start_server, coordinator, publisher
):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    await coordinator.join(server, state="EVICTED")  # its heartbeats were late
    await until(lambda: coordinator.states("a").count(("READY", 0)) == 2, "ready again")
    assert await server.steps() == [0]


async def test_a_server_that_left_is_forgotten_and_its_pair_ended(start_server, coordinator, publisher):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    await coordinator.leave("a")
    await until(lambda: publisher.versions == {}, "forgotten")

    async def alone():
        return (await server.seen())["pairs"] == []

    await until(alone, "pair ended")


async def test_a_newer_epoch_stops_the_publisher_for_good(start_server, coordinator, publisher):
    server = await start_server("a")
    await coordinator.join(server)
    await publisher.publish(peer.snapshot(0))
    await delivered(publisher, 0)
    coordinator.epoch = 2
    await publisher.publish(peer.snapshot(1))  # may still reach the server, which knows no better
    with pytest.raises(StaleEpochError, match="epoch 2 has started"):
        await publisher.wait_delivered(Version(1, 99), timeout_s=DEADLINE_S)
    with pytest.raises(StaleEpochError, match="another trainer has taken over"):
        await publisher.publish(peer.snapshot(2))


async def test_versions_only_grow_and_belong_to_the_epoch(publisher):
    await publisher.publish(peer.snapshot(3))
    with pytest.raises(ValueError, match=r"cannot publish 1\.3: .* has published 1\.3 last"):
        await publisher.publish(peer.snapshot(3))
    with pytest.raises(ValueError, match=r"cannot publish 2\.4"):
        await publisher.publish(peer.snapshot(4, epoch=2))


async def test_closing_leaves_every_pair_on_both_sides(start_server, coordinator):
    config = WeightSyncConfig(transport="gloo", bucket_bytes=peer.BUCKET_BYTES)
    servers = [await start_server(name) for name in ("a", "b")]
    for server in servers:
        await coordinator.join(server)
    async with Publisher(coordinator, epoch=1, token=peer.TOKEN, config=config) as publisher:
        await publisher.publish(peer.snapshot(0))
        await delivered(publisher, 0, servers=2)
        assert [len((await server.seen())["pairs"]) for server in servers] == [1, 1]
    assert [(await server.seen())["pairs"] for server in servers] == [[], []]
