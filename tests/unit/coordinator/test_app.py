"""The routes as the other roles see them: the real client against the real application in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from inflight_runtime.coordinator.app import build_app
from inflight_runtime.coordinator.client import (
    CoordinatorClient,
    CoordinatorError,
    CoordinatorUnavailableError,
    FencedError,
)
from inflight_runtime.coordinator.metrics import Metrics
from inflight_runtime.coordinator.service import Coordinator
from inflight_runtime.protocol import (
    CheckpointDurable,
    DatasetInfo,
    DropRequest,
    FailRequest,
    Lease,
    LeaseRef,
    LeaseReply,
    LeaseRequest,
    MemberBeat,
    MemberState,
    RenewRequest,
    StepCommit,
    TrainerStart,
    VersionField,
)
from inflight_runtime.types import Group, InvalidSampleError
from support.coordinators import TOKEN, Desk, coordinator_config, group_for

_requests = itertools.count()


class Site:
    """A coordinator served in this process, and clients of it."""

    def __init__(self, desk: Desk, config: Any, stack: AsyncExitStack) -> None:
        metrics = Metrics()
        self.stack = stack
        self.coordinator = Coordinator(config, desk.ledger, desk.payloads, metrics.observe_commit)
        metrics.attach(self.coordinator)
        self.runner = web.AppRunner(build_app(self.coordinator, metrics, TOKEN), shutdown_timeout=1)
        self.url = ""

    async def start(self) -> None:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self.stack.push_async_callback(self.stop)
        self.client = await self.new_client()

    async def stop(self) -> None:
        await self.coordinator.close()
        await self.runner.cleanup()

    async def new_client(self, token: str = TOKEN) -> CoordinatorClient:
        return await self.stack.enter_async_context(CoordinatorClient(self.url, token, retry_for_s=0))

    async def lease(self, count: int, *, actor: str = "actor-0", wait: float = 0.0) -> LeaseReply:
        request = LeaseRequest(
            actor_id=actor, request_id=f"request-{next(_requests)}", max_groups=count, wait_seconds=wait
        )
        return await self.client.lease(request)

    async def announce(self, **changes: Any) -> None:
        await self.client.announce_dataset(DatasetInfo(**({"actor_id": "actor-0", "size": 100} | changes)))

    async def join(self, server: str = "s0", boot: str = "b0", **changes: Any) -> Any:
        values: dict[str, Any] = {"url": "http://s0", "engine": "vllm", "capacity": 8, "max_length": 64} | changes
        return await self.client.beat(MemberBeat(server_id=server, boot_id=boot, **values))


Make = Callable[..., Any]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def make_site(**changes: Any) -> Site:
            config = coordinator_config(tmp_path, **changes)
            site = Site(Desk.open(config), config, stack)
            await site.start()
            return site

        yield make_site


def finished(lease: Lease, **changes: Any) -> Group:
    return group_for(lease.group_id, lease.fence, lease.problem_index, **changes)


async def test_a_whole_run_over_http(make: Make) -> None:
    site = await make(steps=3)
    await site.announce()
    started = await site.client.start_trainer(TrainerStart(resume_step=0))
    assert (started.epoch, started.steps) == (1, 3)
    for step in (1, 2, 3):
        reply = await site.lease(2)
        for lease in reply.leases:
            assert (await site.client.submit(finished(lease, step=step - 1))).state == "completed"
        batch = await site.client.batch(step, 1, 5)
        assert batch is not None
        assert (batch.step, batch.policy_step, batch.planned_groups, batch.excluded) == (step, step - 1, 2, {})
        assert [group.group_id for group in batch.groups] == [lease.group_id for lease in reply.leases]
        assert batch.groups[0].attempts[1].reward == 1.0
        await site.client.commit(step, StepCommit(epoch=1, metrics={"reward": step / 10}))
        await site.client.checkpoint(CheckpointDurable(epoch=1, step=step, oldest_step=step))
    state = await site.client.state()
    assert (state.outcome, state.step, state.epoch, state.checkpoint_step) == ("succeeded", 3, 1, 3)
    assert state.groups == {"submitted": 6, "leased": 0, "completed": 0, "assigned": 0, "trained": 6, "dropped": 0}
    assert state.metrics == {"reward": 0.3}
    assert (state.actors, state.trainer_starts) == (1, 1)
    assert (await site.lease(1)).finished


async def test_every_route_but_health_asks_for_the_token(make: Make) -> None:
    site = await make()
    stranger = await site.new_client("wrong")
    with pytest.raises(CoordinatorError, match="bearer token is missing or wrong") as refusal:
        await stranger.state()
    assert refusal.value.status == 401
    async with aiohttp.ClientSession(site.url) as session:
        guarded = [
            (route.method, str(route.resource.canonical).replace("{group_id}", "1").replace("{step}", "1"))
            for route in site.runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        ]
        answers = {path: (await session.request(method, path)).status for method, path in guarded}
    assert {path for path, status in answers.items() if status == 200} == {"/healthz", "/readyz", "/metrics"}
    assert {status for path, status in answers.items() if path.startswith("/v1/")} == {401}


async def test_bad_requests_are_answered_with_what_is_wrong(make: Make) -> None:
    site = await make()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(site.url, headers=headers) as session:

        async def ask(method: str, path: str, **options: Any) -> tuple[int, str]:
            async with session.request(method, path, **options) as reply:
                return reply.status, (await reply.json())["error"]

        assert await ask("POST", "/v1/leases", json={"actor_id": "a", "request_id": "r", "max_groups": 0}) == (
            422,
            "POST /v1/leases: max_groups: Input should be greater than or equal to 1",
        )
        assert (await ask("POST", "/v1/leases", json={"actor_id": "a", "slots": 3}))[0] == 422
        assert (await ask("POST", "/v1/leases", data=b"{"))[0] == 422
        assert (await ask("POST", "/v1/groups", data=b"rubbish"))[0] == 422
        assert (await ask("POST", "/v1/leases", data=b" " * 2_000_000))[0] == 413
        assert (await ask("GET", "/v1/nothing"))[0] == 404
        assert (await ask("GET", "/v1/leases"))[0] == 405
        assert await ask("GET", "/v1/members?revision=x") == (422, "query parameter revision='x' is not a number")
        assert (await ask("GET", "/v1/members?wait_seconds=nan"))[0] == 422


async def test_a_lease_request_waits_for_room_and_gets_it(make: Make) -> None:
    site = await make(max_staleness=0)
    await site.announce()
    await site.client.start_trainer(TrainerStart(resume_step=0))
    first, second = (await site.lease(2)).leases
    assert (await site.lease(1)).reason == "staleness bound"
    waiting = asyncio.create_task(site.lease(1, actor="actor-1", wait=20))
    await site.client.submit(finished(first))
    await site.client.drop(second.group_id, DropRequest(fence=second.fence, reason="attempts_failed", detail="boom"))
    assert [lease.group_id for lease in (await waiting).leases] == [2]


async def test_a_lease_request_waits_for_a_server(make: Make) -> None:
    site = await make(max_leased_groups=None)
    await site.announce()
    epoch = (await site.client.start_trainer(TrainerStart(resume_step=0))).epoch
    assert (await site.lease(1)).reason == "no ready server"
    waiting = asyncio.create_task(site.lease(9, wait=20))
    assert not (await site.join()).known
    ready = MemberState(epoch=epoch, boot_id="b0", state="READY", version=VersionField(epoch=epoch, step=0))
    await site.client.set_member_state("s0", ready)
    assert len((await waiting).leases) == 4
    assert (await site.client.state()).capacity == {"outstanding": 4, "bound": 4, "leased": 4, "cap": 4}
    await site.client.leave("s0", "b0")
    assert (await site.lease(1)).reason == "no ready server"


async def test_a_batch_request_waits_for_its_groups(make: Make) -> None:
    site = await make()
    await site.announce()
    epoch = (await site.client.start_trainer(TrainerStart(resume_step=0))).epoch
    assert await site.client.batch(1, epoch, 0) is None
    waiting = asyncio.create_task(site.client.batch(1, epoch, 20))
    for lease in (await site.lease(2)).leases:
        await site.client.submit(finished(lease))
    batch = await waiting
    assert batch is not None
    assert len(batch.groups) == 2


async def test_a_waiting_trainer_learns_that_it_is_superseded(make: Make) -> None:
    site = await make()
    await site.client.start_trainer(TrainerStart(resume_step=0))
    waiting = asyncio.create_task(site.client.batch(1, 1, 20))
    await asyncio.sleep(0.05)
    await site.client.start_trainer(TrainerStart(resume_step=0))
    with pytest.raises(FencedError, match="another trainer has started since"):
        await waiting


async def test_a_failed_run_tells_everybody_who_waits(make: Make) -> None:
    site = await make()
    epoch = (await site.client.start_trainer(TrainerStart(resume_step=0))).epoch
    members = await site.client.members()
    trainer = asyncio.create_task(site.client.batch(1, epoch, 20))
    actor = asyncio.create_task(site.lease(1, wait=20))
    router = asyncio.create_task(site.client.members(members.revision, 20))
    await asyncio.sleep(0.05)
    await site.client.fail(FailRequest(source="actor-0", reason="the environment always raises"))
    reply = await actor
    assert reply.finished
    assert reply.reason == "actor-0: the environment always raises"
    with pytest.raises(CoordinatorError, match="the run has failed: actor-0: the environment") as refusal:
        await trainer
    assert refusal.value.status == 410
    assert (await router).finished
    state = await site.client.state()
    assert (state.outcome, state.reason) == ("failed", "actor-0: the environment always raises")


async def test_leases_that_are_not_renewed_are_given_to_somebody_else(make: Make) -> None:
    site = await make(lease_ttl_s=0.4, max_staleness=0)
    await site.announce()
    lost, kept = (await site.lease(2)).leases
    keep = RenewRequest(actor_id="actor-0", leases=[LeaseRef(group_id=kept.group_id, fence=kept.fence)])
    waiting = asyncio.create_task(site.lease(1, actor="actor-1", wait=20))
    while not waiting.done():
        assert (await site.client.renew(keep)).lost == []
        await asyncio.sleep(0.05)
    again = (await waiting).leases[0]
    assert (again.group_id, again.problem_index, again.fence) == (lost.group_id, lost.problem_index, 2)
    renewal = RenewRequest(actor_id="actor-0", leases=[LeaseRef(group_id=lost.group_id, fence=lost.fence)])
    assert (await site.client.renew(renewal)).lost == renewal.leases
    with pytest.raises(FencedError):
        await site.client.submit(finished(lost))
    assert (await site.client.submit(finished(again))).state == "completed"
    assert (await site.client.submit(finished(again))).state == "completed"
    state = await site.client.state()
    assert (state.fenced, state.duplicates, state.leases_expired) == (1, 1, 1)


async def test_released_leases_are_there_at_once(make: Make) -> None:
    site = await make(max_staleness=0)
    await site.announce()
    leases = (await site.lease(2)).leases
    refs = [LeaseRef(group_id=lease.group_id, fence=lease.fence) for lease in leases]
    waiting = asyncio.create_task(site.lease(2, actor="actor-1", wait=20))
    await site.client.release(RenewRequest(actor_id="actor-0", leases=refs))
    assert [(lease.group_id, lease.fence) for lease in (await waiting).leases] == [(0, 2), (1, 2)]


async def test_membership_is_seen_by_all_and_changes_are_pushed(make: Make) -> None:
    site = await make(member_ttl_s=0.4)
    epoch = (await site.client.start_trainer(TrainerStart(resume_step=0))).epoch
    before = await site.client.members()
    assert before.members == []
    waiting = asyncio.create_task(site.client.members(before.revision, 20))
    await site.join()
    after = await waiting
    assert after.revision > before.revision
    assert [(member.server_id, member.state) for member in after.members] == [("s0", "JOINING")]
    with pytest.raises(FencedError):
        await site.client.set_member_state("s0", MemberState(epoch=epoch, boot_id="other", state="SYNCING"))
    with pytest.raises(CoordinatorError, match="READY needs a version"):
        await site.client.set_member_state("s0", MemberState(epoch=epoch, boot_id="b0", state="READY"))
    lost = await site.client.members(after.revision, 20)
    assert [(member.state, member.reason) for member in lost.members] == [("EVICTED", "heartbeat lost")]


async def test_rollouts_are_shown_as_people_read_them(make: Make) -> None:
    site = await make()
    await site.announce()
    await site.client.start_trainer(TrainerStart(resume_step=0))
    for lease in (await site.lease(2)).leases:
        await site.client.submit(finished(lease, rewards=[0.25, 0.75], text="four"))
    await site.client.batch(1, 1, 5)
    await site.client.commit(1, StepCommit(epoch=1))
    samples = await site.client.samples(step=1, limit=3)
    assert len(samples) == 3
    first = samples[0]
    assert first["prompt_text"] == "prompt"
    assert (first["text"], first["reward"], first["parts"]) == ("four", 0.25, {"exact": 0.25})
    assert (first["group_id"], first["attempt"], first["step"], first["state"]) == (0, 0, 1, "trained")
    assert (first["versions"], first["servers"], first["tokens"]) == (["1.0"], ["inference-0"], 3)
    assert await site.client.samples(step=7) == []


async def test_metrics_show_the_run(make: Make) -> None:
    site = await make()
    await site.announce()
    await site.lease(2)
    await site.join()
    async with aiohttp.ClientSession() as session, session.get(f"{site.url}/metrics") as reply:
        text = await reply.text()
    for line in (
        'inflight_groups{state="leased"} 2.0',
        "inflight_submitted_total 2.0",
        'inflight_members{state="JOINING"} 1.0',
        "inflight_capacity_outstanding 2.0",
        "inflight_capacity_bound 4.0",
        'inflight_run{outcome="running"} 1.0',
    ):
        assert line in text.splitlines()
    assert 'inflight_request_seconds_count{route="POST /v1/leases",status="200"} 1.0' in text
    assert "inflight_commit_operations_count" in text


async def test_readiness_ends_with_shutdown_and_long_polls_are_let_go(make: Make) -> None:
    site = await make()
    await site.announce()
    members = await site.client.members()
    polls = [
        asyncio.create_task(site.client.members(members.revision, 25)),
        asyncio.create_task(site.client.batch(1, 0, 25)),
    ]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(site.coordinator.close(), 10)
    reply, batch = await asyncio.wait_for(asyncio.gather(*polls), 10)
    assert reply.revision == members.revision
    assert batch is None
    async with aiohttp.ClientSession() as session, session.get(f"{site.url}/readyz") as ready:
        assert ready.status == 503
    with pytest.raises(CoordinatorUnavailableError, match="shutting down"):
        await site.lease(1)


async def test_the_client_outlives_an_absent_coordinator_for_as_long_as_told(unused_tcp_port: int) -> None:
    async with CoordinatorClient(f"http://127.0.0.1:{unused_tcp_port}", TOKEN, retry_for_s=0.3) as client:
        with pytest.raises(CoordinatorUnavailableError, match="Is the coordinator running"):
            await client.state()


async def test_the_client_refuses_to_make_sense_of_a_damaged_group(make: Make) -> None:
    site = await make()
    await site.announce()
    lease = (await site.lease(1)).leases[0]
    broken = finished(lease)
    broken.attempts[0].segments[0].logprobs[3] = -1.0
    with pytest.raises(CoordinatorError, match="was not sampled carries a logprob") as refusal:
        await site.client.submit(broken)
    assert refusal.value.status == 422
    with pytest.raises(InvalidSampleError):
        broken.validate()


async def test_evaluation_is_leased_when_a_server_serves_the_weights(make: Make) -> None:
    site = await make(evaluation={"every_steps": 1, "prompts": 2, "attempts": 2}, max_leased_groups=None)
    await site.announce(eval_size=5)
    epoch = (await site.client.start_trainer(TrainerStart(resume_step=0))).epoch
    waiting = asyncio.create_task(site.lease(2, wait=20))
    await site.join()
    await site.client.set_member_state(
        "s0", MemberState(epoch=epoch, boot_id="b0", state="READY", version=VersionField(epoch=epoch, step=0))
    )
    leases = (await waiting).leases
    assert [lease.kind for lease in leases] == ["eval", "eval"]
    for lease in leases:
        assert (await site.client.submit(finished(lease, rewards=[0.5, 1.0]))).state == "evaluated"
    state = await site.client.state()
    assert (state.evaluation["step"], state.evaluation["reward_mean"]) == (0, 0.75)
    assert state.groups["submitted"] == 0
