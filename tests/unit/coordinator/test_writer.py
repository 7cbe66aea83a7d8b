from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inflight_runtime.coordinator.ledger import Ledger
from inflight_runtime.coordinator.rollouts import Grant
from inflight_runtime.coordinator.run import RefusedError
from inflight_runtime.coordinator.snapshot import Snapshot
from inflight_runtime.coordinator.writer import Writer, WriterClosedError
from support.coordinators import Desk, coordinator_config


class Watched:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.commits: list[tuple[Snapshot, int]] = []
        self.writer = Writer(desk.ledger, lambda snapshot, count, _: self.commits.append((snapshot, count)))

    async def lease(self, request: str) -> Grant:
        return await self.writer.run(lambda ledger: ledger.rollouts.lease("actor", request, 1, 64, None))


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    desk = Desk.open(coordinator_config(tmp_path, max_staleness=20))
    desk.announce()
    found = Watched(desk)
    yield found
    await found.writer.close()
    desk.payloads.close()


async def test_operations_share_transactions_and_come_back_in_order(watched: Watched) -> None:
    grants = await asyncio.gather(*(watched.lease(f"r{number}") for number in range(20)))
    assert [grant.leases[0].group_id for grant in grants] == list(range(20))
    assert sum(count for _, count in watched.commits) == 20
    assert len(watched.commits) < 20
    assert watched.commits[-1][0].states["leased"] == 20


async def test_one_that_fails_does_not_spoil_the_others(watched: Watched) -> None:
    def writes_and_fails(ledger: Ledger) -> None:
        ledger.rollouts.lease("actor", "bad", 1, 64, None)
        raise RefusedError(409, "no")

    results = await asyncio.gather(
        watched.lease("a"), watched.writer.run(writes_and_fails), watched.lease("b"), return_exceptions=True
    )
    assert isinstance(results[1], RefusedError)
    assert watched.commits[-1][0].states["leased"] == 2
    watched.desk.ledger.audit()


async def test_a_transaction_that_cannot_be_written_fails_all_of_it_and_the_next_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(watched.desk.payloads, "sync", fail)
        results = await asyncio.gather(watched.lease("a"), watched.lease("b"), return_exceptions=True)
    assert [type(result) for result in results] == [OSError, OSError]
    assert (await watched.lease("c")).leases[0].group_id == 0


async def test_closing_finishes_what_waits_and_takes_nothing_more(watched: Watched) -> None:
    waiting = [asyncio.create_task(watched.lease(f"r{number}")) for number in range(5)]
    await asyncio.sleep(0)
    await watched.writer.close()
    grants = await asyncio.gather(*waiting)
    assert [grant.leases[0].group_id for grant in grants] == list(range(5))
    with pytest.raises(WriterClosedError):
        await watched.lease("late")


async def test_an_operation_goes_on_when_its_caller_has_left(watched: Watched) -> None:
    task = asyncio.create_task(watched.lease("left"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await watched.lease("left")).leases[0].group_id == 0
