"""What the computing thread and the network thread say to each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.coordinator.client import CoordinatorError, FencedError
from inflight_runtime.protocol import FailRequest, Member, MembersReply, RunState, StepCommit, VersionField
from inflight_runtime.trainer import remote as remote_module
from inflight_runtime.trainer.remote import NoBatchError, Remote
from inflight_runtime.types import Version
from inflight_runtime.weights.errors import StaleEpochError
from support.trainer_fakes import FakeCoordinator, random_batches

NEVER = lambda: False  # noqa: E731


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


def test_a_batch_that_is_late_is_waited_for(background: BackgroundLoop) -> None:
    polls = iter([None, None, random_batches(0)(1)])
    coordinator = FakeCoordinator(lambda step: next(polls))
    batch = Remote(background, coordinator).wait_for_batch(1, NEVER)
    assert batch is not None
    assert batch.step == 1
    assert coordinator.asked == [1, 1, 1]


def test_a_prefetched_batch_is_fetched_once(background: BackgroundLoop) -> None:
    coordinator = FakeCoordinator(random_batches(0))
    remote = Remote(background, coordinator)
    remote.prefetch(2)
    remote.prefetch(2)
    batch = remote.wait_for_batch(2, NEVER)
    assert batch is not None
    assert coordinator.asked == [2]


def test_waiting_ends_when_told_to_stop(background: BackgroundLoop) -> None:
    answers = iter([False, False, True])
    assert Remote(background, FakeCoordinator(lambda step: None)).wait_for_batch(1, lambda: next(answers)) is None


class Reasoning(FakeCoordinator):
    async def state(self) -> RunState:
        return RunState(
            job="test", outcome="running", reason="no ready server", epoch=1, step=0, steps=4,
            policy_version=VersionField(epoch=1, step=0), groups={"leased": 3}, dropped={}, attempts_failed=0,
            duplicates=0, fenced=0, leases_expired=0, capacity={}, metrics={},
        )  # fmt: skip


def test_a_waiting_trainer_says_why_and_gives_up_in_the_end(
    background: BackgroundLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_module, "WAKE_S", 0.01)
    monkeypatch.setattr(remote_module, "REPORT_S", 0.1)
    monkeypatch.setattr(remote_module, "BATCH_DEADLINE_S", 0.5)
    caplog.set_level(logging.INFO)
    with pytest.raises(NoBatchError, match=r"no batch for step 1 within 0\.5 s: no ready server.*'leased': 3"):
        Remote(background, Reasoning(lambda step: None)).wait_for_batch(1, NEVER)
    assert 1 <= caplog.text.count("waiting for the batch of step 1") <= 5


def test_being_superseded_is_raised_where_the_batch_is_waited_for(background: BackgroundLoop) -> None:
    remote = Remote(background, FakeCoordinator(random_batches(0), taken_over_at=1))
    with pytest.raises(FencedError):
        remote.wait_for_batch(1, NEVER)


def test_a_timeout_of_the_client_itself_is_not_taken_for_waiting(background: BackgroundLoop) -> None:
    def batches(step: int) -> None:
        raise TimeoutError("from inside")

    with pytest.raises(TimeoutError, match="from inside"):
        Remote(background, FakeCoordinator(batches)).wait_for_batch(1, NEVER)


def test_a_commit_does_not_wait_for_its_answer_and_the_next_one_does(background: BackgroundLoop) -> None:
    arrived: list[int] = []
    go_on = asyncio.Event()

    class Slow(FakeCoordinator):
        async def commit(self, step: int, request: StepCommit) -> None:
            await go_on.wait()
            arrived.append(step)

    remote = Remote(background, Slow(random_batches(0)))
    remote.commit(1, {}, lambda: False)
    assert arrived == []
    background.loop.call_soon_threadsafe(go_on.set)
    remote.commit(2, {}, lambda: False)
    assert arrived[0] == 1
    remote.settle()
    assert arrived == [1, 2]


class FailingPublisher:
    async def publish(self, snapshot: object) -> None:
        raise StaleEpochError("epoch 1 is over")

    async def aclose(self) -> None:
        await asyncio.sleep(60)


def test_a_failed_publication_is_raised_at_the_next_commit(background: BackgroundLoop) -> None:
    remote = Remote(background, FakeCoordinator(random_batches(0)))
    remote.set_publisher(FailingPublisher)
    remote.publish(None)  # type: ignore[arg-type]
    with pytest.raises(StaleEpochError):
        remote.commit(1, {}, lambda: False)


def test_a_publisher_that_does_not_close_is_left_behind(
    background: BackgroundLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_module, "CLOSE_S", 0.05)
    remote = Remote(background, FakeCoordinator(random_batches(0)))
    remote.set_publisher(FailingPublisher)
    remote.close()
    assert "did not close" in caplog.text


class Serving(FakeCoordinator):
    """Servers at the given ``(state, version)``; each look takes the next row."""

    def __init__(self, *rows: list[tuple[str, tuple[int, int] | None]]) -> None:
        super().__init__(lambda step: None)
        self.rows = list(rows)

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        row = self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]
        members = [
            Member(
                server_id=f"server-{index}", boot_id="b", url="http://x", engine="vllm", world_size=1, capacity=1,
                max_length=8, state=state, version=VersionField(epoch=v[0], step=v[1]) if v else None,
            )
            for index, (state, v) in enumerate(row)
        ]  # fmt: skip
        return MembersReply(
            revision=1, epoch=1, policy_version=VersionField(epoch=1, step=0), finished=False, members=members
        )


def test_the_end_waits_for_servers_in_use_and_for_no_others(background: BackgroundLoop) -> None:
    coordinator = Serving(
        [("READY", (1, 3)), ("UPDATING", (1, 3)), ("EVICTED", (1, 0))],
        [("READY", (1, 4)), ("UPDATING", (1, 3)), ("JOINING", None)],
        [("READY", (1, 4)), ("READY", (1, 4)), ("SYNCING", None)],
    )
    assert Remote(background, coordinator).wait_for_servers(Version(1, 4), 30.0)
    assert len(coordinator.rows) == 1


def test_a_server_that_never_gets_the_last_version_is_named_and_left(
    background: BackgroundLoop, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Serving([("READY", (1, 4)), ("READY", (1, 3))])
    assert not Remote(background, coordinator).wait_for_servers(Version(1, 4), 0.1)
    assert "version 1.4 did not reach server-1" in caplog.text


def test_a_failure_that_cannot_be_reported_is_logged(
    background: BackgroundLoop, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(FakeCoordinator):
        async def fail(self, request: FailRequest) -> None:
            raise CoordinatorError(410, "over already")

    Remote(background, Refusing(random_batches(0))).fail("because")
    assert "over already" in caplog.text
