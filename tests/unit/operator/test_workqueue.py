"""The keyed work queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_operator.workqueue import LAST_RETRY_S, Attempt, WorkQueue
from support.virtual_time import run_in_virtual_time

DEADLINE_S = 10.0


@contextlib.asynccontextmanager
async def running(queue: WorkQueue) -> AsyncIterator[WorkQueue]:
    task = asyncio.create_task(queue.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield queue
    finally:
        task.cancel()
        await asyncio.wait({task})


class Recorder:
    """A work function that tells what it was called with, and waits or fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.at_once: Counter[str] = Counter()
        self.twins = 0
        self.called = asyncio.Condition()
        self.gate: asyncio.Event | None = None
        self.outcome: Callable[[str], Awaitable[float | None]] | None = None

    async def __call__(self, key: str) -> float | None:
        self.at_once[key] += 1
        self.twins += self.at_once[key] > 1
        try:
            async with self.called:
                self.calls.append(key)
                self.called.notify_all()
            if self.gate is not None:
                await self.gate.wait()
            return await self.outcome(key) if self.outcome is not None else None
        finally:
            self.at_once[key] -= 1

    async def wait_for(self, count: int) -> None:
        async with self.called:
            await self.called.wait_for(lambda: len(self.calls) >= count)


async def test_a_key_added_many_times_while_it_waits_is_worked_on_once() -> None:
    work = Recorder()
    queue = WorkQueue(work)
    for _ in range(5):
        queue.add("a")
    queue.add("b")
    assert len(queue) == 2
    async with running(queue):
        await work.wait_for(2)
        queue.add("end")
        await work.wait_for(3)
    assert work.calls == ["a", "b", "end"]


async def test_a_key_added_while_it_is_worked_on_is_worked_on_once_more_and_never_twice_at_once() -> None:
    work = Recorder()
    work.gate = asyncio.Event()
    async with running(WorkQueue(work)) as queue:
        queue.add("a")
        await work.wait_for(1)
        for _ in range(3):
            queue.add("a")
        queue.add("b")
        await work.wait_for(2)
        assert work.calls == ["a", "b"]
        work.gate.set()
        await work.wait_for(3)
        queue.add("end")
        await work.wait_for(4)
    assert work.calls == ["a", "b", "a", "end"]
    assert work.twins == 0


async def test_failed_work_is_tried_again_with_a_growing_delay_and_success_forgets_it() -> None:
    work, seen = Recorder(), list[Attempt]()
    left = 3

    async def fail(key: str) -> float | None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ValueError("not yet")
        return None

    work.outcome = fail
    async with running(WorkQueue(work, first_retry_s=0.01, on_attempt=seen.append)) as queue:
        queue.add("a")
        await work.wait_for(4)
        queue.add("end")
        await work.wait_for(5)
    assert [attempt.failures for attempt in seen[:4]] == [1, 2, 3, 0]
    assert [attempt.again_in_s for attempt in seen[:4]] == pytest.approx([0.01, 0.02, 0.04, None])
    assert [str(attempt.error) for attempt in seen[:3]] == ["not yet"] * 3


async def test_the_delay_stops_growing_at_a_minute() -> None:
    seen = list[Attempt]()

    async def fail(key: str) -> float | None:
        raise ValueError

    queue = WorkQueue(fail, on_attempt=seen.append)
    async with running(queue):
        for number in range(12):
            queue.add("a")
            while len(seen) <= number:  # noqa: ASYNC110  the hook is no coroutine
                await asyncio.sleep(0)
    assert seen[-1].again_in_s == LAST_RETRY_S
    assert seen[-1].failures == 12


async def test_work_that_hangs_is_cut_off_and_holds_up_nobody() -> None:
    work, seen = Recorder(), list[Attempt]()

    async def hang(key: str) -> float | None:
        if key == "stuck":
            await asyncio.Event().wait()
        return None

    work.outcome = hang
    async with running(WorkQueue(work, workers=2, deadline_s=0.2, on_attempt=seen.append)) as queue:
        queue.add("stuck")
        await work.wait_for(1)
        for key in "abc":
            queue.add(key)
        await work.wait_for(4)
        assert queue.oldest_wait_s() > 0
        while not any(attempt.key == "stuck" for attempt in seen):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stuck = next(attempt for attempt in seen if attempt.key == "stuck")
    assert isinstance(stuck.error, TimeoutError)
    assert stuck.again_in_s is not None


async def test_a_key_asks_to_be_called_again_later_and_an_earlier_wish_wins() -> None:
    work = Recorder()
    async with running(WorkQueue(work)) as queue:
        queue.add_after("a", 600.0)
        queue.add_after("a", 0.01)
        queue.add_after("a", 300.0)
        await work.wait_for(1)
        queue.add_after("b", 600.0)
        queue.forget("b")
        queue.add("end")
        await work.wait_for(2)
    assert work.calls == ["a", "end"]


async def test_a_hook_that_raises_does_not_stop_the_queue() -> None:
    work = Recorder()

    def broken(attempt: Attempt) -> None:
        raise RuntimeError

    async with running(WorkQueue(work, on_attempt=broken)) as queue:
        queue.add("a")
        await work.wait_for(1)
        queue.add("b")
        await work.wait_for(2)


async def test_an_idle_queue_has_no_wait() -> None:
    async def nothing(key: str) -> float | None:
        return None

    assert WorkQueue(nothing).oldest_wait_s() == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40), st.integers(1, 4))
def test_whatever_the_order_the_last_word_on_each_key_is_seen(events: list[tuple[str, int]], workers: int) -> None:
    """The promise that level-triggered code leans on: after its last event, each key is worked on once more."""

    async def play() -> None:
        wanted: dict[str, int] = {}
        done: dict[str, int] = {}

        async def work(key: str) -> float | None:
            value = wanted[key]
            await asyncio.sleep(0)
            done[key] = value
            return None

        async with running(WorkQueue(work, workers=workers)) as queue:
            for number, (key, pauses) in enumerate(events):
                wanted[key] = number
                queue.add(key)
                for _ in range(pauses):
                    await asyncio.sleep(0)
            while done != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0)

    asyncio.run(play())


def test_a_long_queue_is_not_stuck_but_calls_that_never_end_are() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def work(key: str) -> float | None:
            await asyncio.sleep(20)
            if key == "last":
                await gate.wait()
            return None

        queue = WorkQueue(work, workers=2, deadline_s=10_000)
        assert queue.stuck_s() == 0.0
        task = asyncio.create_task(queue.run())
        for number in range(40):
            queue.add(f"slow-{number}")
        await asyncio.sleep(300)
        assert queue.oldest_wait_s() > 290
        assert queue.stuck_s() <= 20
        await asyncio.sleep(200)
        assert queue.stuck_s() == 0.0
        queue.add("last")
        await asyncio.sleep(300)
        assert queue.stuck_s() == 300
        task.cancel()

    run_in_virtual_time(main())


async def test_work_that_nobody_takes_is_stuck() -> None:
    async def nothing(key: str) -> float | None:
        return None

    queue = WorkQueue(nothing)
    queue.add("a")
    await asyncio.sleep(0.05)
    assert queue.stuck_s() > 0.0
