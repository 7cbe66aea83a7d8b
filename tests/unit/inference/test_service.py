"""The engine-independent half of the contract, against a port that fails where it is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.config.roles import InferenceConfig, ModelFiles
from inflight_runtime.inference.service import ContractError, Load, UpdateService, check_token, heartbeat
from inflight_runtime.protocol import (
    DestroyGroupRequest,
    InitGroupRequest,
    MemberBeat,
    MemberReply,
    WeightUpdateRequest,
)
from inflight_runtime.types import Version

CONFIG = InferenceConfig(
    job="j",
    server_id="i0",
    engine="reference",
    port=1,
    advertise_url="http://127.0.0.1:1",
    coordinator_url="http://127.0.0.1:2",
    token_file=Path("none"),
    model=ModelFiles(path="m", tokenizer="m", max_length=64),
    served_name="m",
    max_concurrent=8,
    update_deadline_s=5.0,
)


class FakePort:
    """Records its calls in order; ``fails`` maps a call to what it raises, ``holds`` to an event it waits for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.holds: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.active = 0
        self.most_active = 0

    async def _call(self, name: str, detail: object = "") -> None:
        self.calls.append(f"{name} {detail}".strip())
        self.reached.setdefault(name, asyncio.Event()).set()
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            if name in self.holds:
                await self.holds[name].wait()
            await asyncio.sleep(0)
            if name in self.fails:
                raise self.fails[name]
        finally:
            self.active -= 1

    async def wait_for(self, name: str) -> None:
        async with asyncio.timeout(5):
            await self.reached.setdefault(name, asyncio.Event()).wait()

    async def join(self, request: InitGroupRequest) -> None:
        await self._call("join", request.tag)

    async def leave(self, tag: str) -> None:
        self.calls.append(f"leave {tag}")

    async def check(self, request: WeightUpdateRequest) -> None:
        await self._call("check")

    async def receive(self, request: WeightUpdateRequest) -> Any:
        await self._call("receive", f"{request.epoch}.{request.step}")
        return f"weights of {request.epoch}.{request.step}"

    async def pause(self) -> None:
        await self._call("pause")

    async def commit(self, staged: Any) -> None:
        await self._call("commit", staged)

    async def set_version(self, version: Version) -> None:
        await self._call("label", version)

    async def resume(self) -> None:
        await self._call("resume")

    async def abort_all(self, reason: str) -> None:
        await self._call("abort")


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def service(port: FakePort) -> UpdateService:
    return UpdateService(CONFIG, port, engine="fake", load=lambda: Load(3, 2), boot_id="b")


def group(epoch: int = 1, tag: str = "t", **changes: Any) -> InitGroupRequest:
    return InitGroupRequest(epoch=epoch, tag=tag, master_address="127.0.0.1", master_port=1, **changes)


def update(
    epoch: int = 1, step: int = 0, tag: str = "t", digest: str = "d", timeout: float = 5.0
) -> WeightUpdateRequest:
    return WeightUpdateRequest(
        epoch=epoch, step=step, tag=tag, tensors=[], bucket_bytes=1024, digest=digest, timeout_seconds=timeout
    )


async def refused(awaitable: Any, status: int, word: str | None = None) -> None:
    with pytest.raises(ContractError, match=word) as caught:
        await awaitable
    assert caught.value.status == status


async def test_an_update_runs_its_steps_in_order_and_is_then_what_is_served(
    service: UpdateService, port: FakePort
) -> None:
    await service.init_group(group())
    with pytest.raises(ContractError, match="no weight version yet"):
        service.admit()
    reply = await service.update(update(step=4))
    assert port.calls == [
        "join t",
        "check",
        "receive 1.4",
        "pause",
        "commit weights of 1.4",
        "label 1.4",
        "resume",
    ]
    assert (reply.epoch, reply.step, reply.boot_id, reply.digest) == (1, 4, "b", "d")
    assert service.admit() == service.version == Version(1, 4)
    assert service.salt == "1.4"
    status = service.status()
    assert (status.updates, status.groups, status.digest, status.running, status.waiting) == (1, ["t"], "d", 3, 2)


async def test_a_server_is_ready_from_its_first_weights_until_it_breaks(service: UpdateService) -> None:
    assert "no weight version yet" in service.why_not_ready()
    await service.init_group(group())
    await service.update(update())
    assert service.why_not_ready() == ""
    service.mark_broken("the engine has died")
    assert "the engine has died" in service.why_not_ready()


async def test_the_same_update_again_is_answered_at_once(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    first = await service.update(update())
    calls = len(port.calls)
    assert await service.update(update()) == first
    assert len(port.calls) == calls


async def test_the_same_update_asked_for_while_it_runs_runs_once(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    one, two = (asyncio.create_task(service.update(update())) for _ in range(2))
    await port.wait_for("receive")
    port.holds["receive"].set()
    assert await one == await two
    assert port.calls.count("receive 1.0") == 1


async def test_an_update_outlives_the_client_that_asked_for_it(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    asked = asyncio.create_task(service.update(update()))
    await port.wait_for("receive")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    port.holds["receive"].set()
    assert (await service.update(update())).step == 0
    assert port.calls.count("receive 1.0") == 1


async def test_updates_never_overlap(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    await asyncio.gather(*(service.update(update(step=step)) for step in range(5)), return_exceptions=True)
    assert port.most_active == 1
    assert service.version == Version(1, 4)


async def test_waiting_requests_are_bounded(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    running = [asyncio.create_task(service.update(update(step=step))) for step in range(9)]
    await port.wait_for("receive")
    await refused(service.update(update(step=20)), 503, "waiting")
    port.holds["receive"].set()
    await asyncio.gather(*running)


@pytest.mark.parametrize(
    ("request_", "status", "word"),
    [
        (update(epoch=1, tag="new"), 409, "epoch 1 is over"),
        (update(epoch=2, step=2, tag="new"), 409, "older"),
        (update(epoch=2, step=3, tag="new", digest="other"), 409, "one content"),
        (update(epoch=2, step=4, tag="none"), 409, "init_process_group"),
        (update(epoch=3, step=0, tag="new"), 409, "belongs to epoch 2"),
    ],
)
async def test_what_must_not_be_served_is_refused_before_anything_is_done(
    service: UpdateService, port: FakePort, request_: WeightUpdateRequest, status: int, word: str
) -> None:
    await service.init_group(group())
    await service.init_group(group(2, "new"))
    await service.update(update(2, 3, "new"))
    calls = list(port.calls)
    await refused(service.update(request_), status, word)
    assert port.calls == calls
    assert service.version == Version(2, 3)


async def test_a_rollback_under_a_newer_epoch_is_a_newer_version(service: UpdateService) -> None:
    await service.init_group(group())
    await service.update(update(step=9))
    await service.init_group(group(2, "new"))
    assert (await service.update(update(2, 3, "new"))).step == 3


@pytest.mark.parametrize(("failing", "status"), [("check", 500), ("receive", 502)])
async def test_a_failure_before_the_pause_leaves_the_old_version_serving(
    service: UpdateService, port: FakePort, failing: str, status: int
) -> None:
    await service.init_group(group())
    await service.update(update())
    port.fails[failing] = ContractError(500, "injected") if failing == "check" else RuntimeError("injected")
    del port.calls[:]
    await refused(service.update(update(step=1)), status, "injected")
    assert not {"pause", "abort"} & set(port.calls)
    assert service.admit() == Version(1, 0)
    del port.fails[failing]
    if failing == "receive":
        assert service.status().groups == []  # the stream may be anywhere: the pair is gone
        await service.init_group(group(tag="t2"))
        await service.update(update(step=1, tag="t2"))
    else:
        await service.update(update(step=1))
    assert service.admit() == Version(1, 1)


async def test_a_transfer_that_stalls_is_given_up_at_its_deadline(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    await refused(service.update(update(timeout=0.05)), 504, "old weights")
    assert (service.status().groups, port.calls[-1]) == ([], "leave t")


async def test_a_new_trainer_interrupts_the_transfer_of_an_old_one(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    old = asyncio.create_task(service.update(update()))
    await port.wait_for("receive")
    await service.init_group(group(2, "new"))
    await refused(old, 409, "given up")
    assert service.status().groups == ["new"]
    port.holds["receive"].set()
    await service.update(update(2, 0, "new"))
    assert service.version == Version(2, 0)


async def test_destroying_the_group_ends_a_transfer_over_it(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    hanging = asyncio.create_task(service.update(update()))
    await port.wait_for("receive")
    await service.destroy_group(DestroyGroupRequest(tag="t"))
    await refused(hanging, 409, "given up")


async def test_a_pause_that_fails_resumes_the_old_weights(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    await service.update(update())
    port.fails["pause"] = RuntimeError("injected")
    await refused(service.update(update(step=1)), 503, "injected")
    assert port.calls[-1] == "resume"
    assert service.admit() == Version(1, 0)


@pytest.mark.parametrize("failing", ["commit", "label", "resume"])
async def test_a_failure_after_the_weights_were_touched_breaks_the_server_for_good(
    service: UpdateService, port: FakePort, failing: str
) -> None:
    await service.init_group(group())
    await service.update(update())
    del port.calls[:]
    port.fails[failing] = RuntimeError("injected")
    await refused(service.update(update(step=1)), 503, "injected")
    assert port.calls[-1] == "abort"
    assert port.calls.count("resume") == (failing == "resume")  # never resumed by the error path
    assert "injected" in service.status().broken
    assert "injected" in service.beat().broken
    del port.fails[failing]
    for attempt in (service.update(update(step=2)), service.init_group(group(2, "new"))):
        await refused(attempt, 503, "must be restarted")
    with pytest.raises(ContractError, match="must be restarted"):
        service.admit()
    assert service.version == Version(1, 0)


async def test_a_commit_that_hangs_breaks_the_server(port: FakePort) -> None:
    service = UpdateService(CONFIG.model_copy(update={"update_deadline_s": 0.05}), port, engine="fake")
    await service.init_group(group())
    port.holds["commit"] = asyncio.Event()
    await refused(service.update(update()), 503)
    assert service.broken


class AtomicFakePort(FakePort):
    """A port that can do the four steps as one, for some snapshots."""

    can = True

    def atomic(self, staged: Any) -> bool:
        return self.can

    async def install(self, staged: Any, version: Version) -> float:
        await self._call("install", version)
        return 0.25


async def test_a_port_that_can_does_the_commit_in_one_go() -> None:
    port = AtomicFakePort()
    service = UpdateService(CONFIG, port, engine="fake")
    await service.init_group(group())
    assert (await service.update(update())).commit_ms == 0.25
    assert port.calls[-1] == "install 1.0"
    assert not {"pause", "resume"} & set(port.calls)
    port.can = False
    await service.update(update(step=1))
    assert port.calls[-4:] == ["pause", "commit weights of 1.1", "label 1.1", "resume"]


async def test_a_commit_in_one_go_that_fails_breaks_the_server() -> None:
    port = AtomicFakePort()
    service = UpdateService(CONFIG, port, engine="fake")
    await service.init_group(group())
    await service.update(update())
    port.fails["install"] = RuntimeError("injected")
    await refused(service.update(update(step=1)), 503, "injected")
    assert port.calls[-1] == "abort"
    assert service.version == Version(1, 0)
    with pytest.raises(ContractError, match="must be restarted"):
        service.admit()


@pytest.mark.parametrize(
    ("request_", "status", "word"),
    [
        (group(1, "late"), 409, "is over"),
        (group(2, "new", timeout_seconds=1.0), 409, "taken"),
        (group(2, "big", world_size=3), 400, "world_size"),
    ],
)
async def test_joins_that_cannot_be_right_are_refused(
    service: UpdateService, request_: InitGroupRequest, status: int, word: str
) -> None:
    await service.init_group(group(2, "new"))
    await refused(service.init_group(request_), status, word)


async def test_a_repeated_join_is_answered_and_done_once(service: UpdateService, port: FakePort) -> None:
    first = await service.init_group(group())
    assert await service.init_group(group()) == first
    assert port.calls == ["join t"]


async def test_a_join_that_fails_leaves_nothing_behind(service: UpdateService, port: FakePort) -> None:
    port.fails["join"] = RuntimeError("nobody there")
    await refused(service.init_group(group()), 502, "nobody there")
    assert (service.status().groups, port.calls[-1]) == ([], "leave t")


async def test_close_gives_up_what_runs_and_leaves_every_group(service: UpdateService, port: FakePort) -> None:
    await service.init_group(group())
    port.holds["receive"] = asyncio.Event()
    hanging = asyncio.create_task(service.update(update()))
    await port.wait_for("receive")
    await service.close()
    await asyncio.gather(hanging, return_exceptions=True)
    assert hanging.done()
    assert "leave t" in port.calls


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer other"}, {"authorization": "secret"}, {"authorization": "Basic secret"}]
)
def test_a_wrong_token_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ContractError) as caught:
        check_token(headers, "secret")
    assert caught.value.status == 401


def test_the_right_token_passes() -> None:
    check_token({"authorization": "Bearer secret"}, "secret")


class FakeCoordinator:
    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.log: list[str] = []
        self.enough = asyncio.Event()

    async def beat(self, request: MemberBeat) -> MemberReply:
        self.log.append(f"beat {request.server_id}")
        if len(self.log) >= 4:
            self.enough.set()
        if len(self.log) <= self.failures:
            raise ConnectionError("away")
        return MemberReply(known=True, state="READY")

    async def leave(self, server_id: str, boot_id: str) -> None:
        self.log.append(f"leave {server_id} {boot_id}")


@pytest.mark.parametrize("failures", [0, 3])
async def test_heartbeats_go_on_whatever_the_coordinator_does_and_end_with_a_leave(
    service: UpdateService, failures: int
) -> None:
    coordinator = FakeCoordinator(failures)
    task = asyncio.create_task(heartbeat(coordinator, service.beat, interval_s=0.001))
    async with asyncio.timeout(5):
        await coordinator.enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert coordinator.log[:4] == ["beat i0"] * 4
    assert coordinator.log[-1] == "leave i0 b"
