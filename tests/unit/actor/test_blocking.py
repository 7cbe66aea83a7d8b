"""Blocking code of environments: one hop when quick, side by side when slow, given up when it hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from inflight_runtime.actor.blocking import BlockingBatcher, BlockingPool, BlockingTimeoutError


@pytest.fixture
def pool():
    pool = BlockingPool(threads=4, max_hung=3)
    yield pool
    pool.close()


async def test_quick_calls_of_one_turn_share_a_thread_and_keep_their_results_apart(pool):
    batcher = BlockingBatcher(pool)
    loop_thread = threading.get_ident()

    def work(number: int) -> tuple[int, int]:
        return number * number, threading.get_ident()

    results = await asyncio.gather(*(batcher.run(work, (number,), 5.0) for number in range(8)))
    assert [value for value, _ in results] == [number * number for number in range(8)]
    threads = {thread for _, thread in results}
    assert len(threads) == 1
    assert loop_thread not in threads


async def test_a_call_that_raises_costs_only_itself(pool):
    batcher = BlockingBatcher(pool)

    def work(number: int) -> int:
        if number == 1:
            raise KeyError("no such answer")
        if number == 2:
            raise SystemExit(3)
        return number

    results = await asyncio.gather(*(batcher.run(work, (n,), 5.0) for n in range(4)), return_exceptions=True)
    assert results[0] == 0
    assert results[3] == 3
    assert isinstance(results[1], KeyError)
    assert isinstance(results[2], RuntimeError)
    assert "SystemExit" in str(results[2])


async def test_slow_calls_run_side_by_side(pool):
    """Four calls that wait for each other: they can only end if all of them run at once."""
    batcher = BlockingBatcher(pool)
    meeting = threading.Barrier(4, timeout=30)
    results = await asyncio.gather(*(batcher.run(meeting.wait, (), 60.0) for _ in range(4)))
    assert sorted(results) == [0, 1, 2, 3]


async def test_a_call_that_hangs_is_given_up_and_the_others_go_on(pool):
    batcher = BlockingBatcher(pool)
    release = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            release.wait(60)
        return number

    results = await asyncio.gather(*(batcher.run(work, (n,), 0.3) for n in range(6)), return_exceptions=True)
    assert isinstance(results[0], BlockingTimeoutError)
    assert "work did not return within 0.3 s" in str(results[0])
    assert results[1:] == [1, 2, 3, 4, 5]
    assert pool.hung == 1
    release.set()
    async with asyncio.timeout(20):
        while pool.hung:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_hanging_calls_use_up_a_bound_and_no_more_threads(pool):
    batcher = BlockingBatcher(pool)
    release = threading.Event()
    hanging = [BlockingBatcher(pool).run(release.wait, (60,), 0.1) for _ in range(3)]
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(result, BlockingTimeoutError) for result in results)
    with pytest.raises(BlockingTimeoutError, match="3 blocking calls of the environment hang"):
        await batcher.run(int, ("1",), 5.0)
    release.set()
    async with asyncio.timeout(20):
        while pool.hung:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await batcher.run(int, ("1",), 5.0) == 1


async def test_a_caller_that_is_cancelled_leaves_the_others_alone(pool):
    batcher = BlockingBatcher(pool)
    release = threading.Event()
    waiting = asyncio.create_task(batcher.run(release.wait, (60,), 60.0))
    other = asyncio.create_task(batcher.run(int, ("7",), 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await other == 7
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
