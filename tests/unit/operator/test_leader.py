"""Leadership: the Lease, with an API server of a few lines, calls that are late or lost, and a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_operator.kube import KubeError
from inflight_operator.leader import Leadership, LeaseLost
from support.virtual_time import run_in_virtual_time

T = TypeVar("T")
NAMESPACE, NAME = "inflight-system", "inflight-operator"
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def now() -> float:
    return asyncio.get_running_loop().time()


class Store:
    """One Lease, with the API server's resourceVersion."""

    def __init__(self, *, exists: bool = True) -> None:
        self.version = 0
        self.lease: dict[str, Any] | None = None
        self.writes: list[tuple[float, dict[str, Any]]] = []
        if exists:
            self.make()

    def make(self) -> None:
        self.lease = {"metadata": {"name": NAME}, "spec": {}}
        self._stamp()

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return self.lease["spec"]

    def get(self) -> dict[str, Any] | None:
        return copy.deepcopy(self.lease)

    def patch(self, patch: dict[str, Any]) -> dict[str, Any]:
        if self.lease is None:
            raise KubeError(404, "NotFound", "no such Lease")
        if patch["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the object has been modified")
        self.lease["spec"] |= patch["spec"]
        self._stamp()
        self.writes.append((now(), patch["spec"]))
        return copy.deepcopy(self.lease)

    def edit(self, **spec: Any) -> None:
        """What a person does with kubectl."""
        self.spec.update(spec)
        self._stamp()

    def _stamp(self) -> None:
        assert self.lease is not None
        self.version += 1
        self.lease["metadata"]["resourceVersion"] = str(self.version)


class Link:
    """A process's way to the API server. A call that nobody waits for any more still arrives."""

    def __init__(self, store: Store, trouble: Callable[[], tuple[float, float, str]] = lambda: (0.0, 0.0, "")) -> None:
        self.store = store
        self.trouble = trouble
        """Seconds there, seconds back, and ``request`` or ``answer`` for what is lost, or the reason of an error."""
        self.gets = 0

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        assert (kind, namespace, name) == ("Lease", NAMESPACE, NAME)
        self.gets += 1
        return await self._call(self.store.get)

    async def patch(self, kind: str, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        assert (kind, namespace, name) == ("Lease", NAMESPACE, NAME)
        return await self._call(lambda: self.store.patch(patch))

    async def _call(self, serve: Callable[[], T]) -> T:
        there, back, trouble = self.trouble()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def arrive() -> None:
            try:
                result, error = serve(), None
            except KubeError as raised:
                result, error = None, raised
            if trouble != "answer":
                loop.call_later(back, settle, result, error)

        def settle(result: Any, error: KubeError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        if trouble not in ("", "request", "answer"):
            raise KubeError(0 if trouble == "Unreachable" else 403, trouble, "words")
        if trouble != "request":
            loop.call_later(there, arrive)
        return await answer


def contender(link: Link, identity: str, **times: Any) -> Leadership:
    return Leadership(link, NAMESPACE, NAME, identity, clock=times.pop("clock", now), **times)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def task(work: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
    running = asyncio.ensure_future(work)
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait({running})


def virtual(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10_000.0):
            await main()

    run_in_virtual_time(bounded())


def test_a_free_lease_is_taken_and_renewed_with_one_call_each_time() -> None:
    async def main() -> None:
        store = Store()
        link = Link(store)
        first = contender(link, "a")
        began = now()
        await first.acquire()
        assert now() == pytest.approx(began)
        assert store.spec["holderIdentity"] == "a"
        assert store.spec["leaseDurationSeconds"] == 15
        assert store.spec["leaseTransitions"] == 0
        assert MICRO_TIME.fullmatch(store.spec["acquireTime"])
        assert MICRO_TIME.fullmatch(store.spec["renewTime"])
        async with task(first.hold()) as held:
            await asyncio.sleep(60.5)
            assert not held.done()
        assert link.gets == 1
        assert [when - began for when, _ in store.writes] == pytest.approx(
            [3.0 * count for count in range(21)], abs=0.01
        )
        assert all("acquireTime" not in spec for _, spec in store.writes[1:])

    virtual(main)


def test_the_other_one_takes_over_when_the_holder_falls_silent_and_not_before() -> None:
    async def main() -> None:
        store = Store()
        first, second = contender(Link(store), "a"), contender(Link(store), "b")
        await first.acquire()
        async with task(second.acquire()) as waiting:
            async with task(first.hold()):
                await asyncio.sleep(100.0)
                assert not waiting.done()
            silent_since = store.writes[-1][0]
            await waiting
            # Seen at its next look, and then exactly when the time is up.
            assert 15.0 <= now() - silent_since <= 15.0 + 2.4 + 0.1
        assert store.spec["holderIdentity"] == "b"
        assert store.spec["leaseTransitions"] == 1

    virtual(main)


def test_a_release_hands_over_at_once() -> None:
    async def main() -> None:
        store = Store()
        first, second = contender(Link(store), "a"), contender(Link(store), "b")
        await first.acquire()
        async with task(second.acquire()) as waiting:
            async with task(first.hold()):
                await asyncio.sleep(10.0)
            await first.release()
            assert store.spec["holderIdentity"] == ""
            released = now()
            await waiting
            assert now() - released <= 2.41
            before = copy.deepcopy(store.spec)
            await first.release()
            assert store.spec == before

    virtual(main)


def test_a_longer_promise_in_the_lease_is_honoured() -> None:
    async def main() -> None:
        store = Store()
        store.edit(holderIdentity="old-version", leaseDurationSeconds=60, acquireTime="x", leaseTransitions=4)
        began = now()
        await contender(Link(store), "b").acquire()
        assert 60.0 <= now() - began <= 65.0
        assert store.spec["leaseTransitions"] == 5

    virtual(main)


def test_without_an_answer_leadership_ends_in_time_and_says_why() -> None:
    async def main() -> None:
        store, down = Store(), ""
        # The answers are slow: what counts is when a renewal was sent, which is when it is written here.
        first = contender(Link(store, lambda: (0.0, 1.5, down)), "a")
        await first.acquire()
        for trouble, words in (("request", "no answer in time"), ("Unreachable", "Unreachable: words")):
            down = ""
            async with task(first.hold()) as held:
                await asyncio.sleep(7.0)
                down = trouble
                last = store.writes[-1][0]
                with pytest.raises(LeaseLost, match=words):
                    await held
                assert now() - last == pytest.approx(10.0, abs=0.01)
            down = ""
            await first.acquire()

    virtual(main)


def test_a_process_that_was_stopped_knows_before_it_writes() -> None:
    async def main() -> None:
        store, stopped_s = Store(), 0.0
        first = contender(Link(store), "a", clock=lambda: now() + stopped_s)
        with pytest.raises(LeaseLost):
            first.check()
        await first.acquire()
        async with task(first.hold()):
            for _ in range(60):
                first.check()
                await asyncio.sleep(1.0)
            stopped_s = 10.0
            with pytest.raises(LeaseLost, match="for 10 s"):
                first.check()

    virtual(main)


def test_a_short_outage_costs_nothing() -> None:
    async def main() -> None:
        store, down = Store(), ""
        first = contender(Link(store, lambda: (0.0, 0.0, down)), "a")
        await first.acquire()
        async with task(first.hold()) as held:
            for trouble in ("request", "answer", "Unreachable"):
                down = trouble
                await asyncio.sleep(5.0)
                down = ""
                await asyncio.sleep(30.0)
            assert not held.done()

    virtual(main)


def test_a_new_holder_is_noticed_and_a_label_is_not_mistaken_for_one() -> None:
    async def main() -> None:
        store = Store()
        first = contender(Link(store), "a")
        await first.acquire()
        async with task(first.hold()) as held:
            await asyncio.sleep(4.0)
            store.edit()
            await asyncio.sleep(30.0)
            assert not held.done()
            store.edit(holderIdentity="c")
            with pytest.raises(LeaseLost, match="held by c now"):
                await held
        await first.release()
        assert store.spec["holderIdentity"] == "c"

    virtual(main)


def test_a_lease_that_is_not_there_is_asked_for_clearly_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = Store(exists=False)
        async with task(contender(Link(store), "a").acquire()) as waiting:
            await asyncio.sleep(60.0)
            assert not waiting.done()
            store.make()
            await waiting

    with caplog.at_level(logging.WARNING):
        virtual(main)
    assert [record.getMessage() for record in caplog.records] == [
        f"Lease {NAMESPACE}/{NAME} does not exist: apply manifests/. Waiting until it is there"
    ]


def test_each_kind_of_error_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store, down = Store(), "Unreachable"
        async with task(contender(Link(store, lambda: (0.0, 0.0, down)), "a").acquire()) as waiting:
            for trouble in ("Unreachable", "Forbidden", "Unreachable", "request"):
                down = trouble
                await asyncio.sleep(30.0)
            assert not waiting.done()
            down = ""
            await waiting

    with caplog.at_level(logging.WARNING):
        virtual(main)
    assert len(caplog.records) == 3


def test_an_answer_that_is_no_lease_is_never_written_to() -> None:
    async def main() -> None:
        store = Store()
        link = Link(store)
        lease, store.lease = store.lease, {}
        async with task(contender(link, "a").acquire()) as waiting:
            await asyncio.sleep(10.0)
            assert not waiting.done()
            assert store.writes == []
            store.lease = lease
            await waiting

    virtual(main)


def test_an_acquisition_whose_answer_was_lost_is_found_out() -> None:
    async def main() -> None:
        store, troubles = Store(), iter(["", "answer"])
        first = contender(Link(store, lambda: (0.0, 0.0, next(troubles, ""))), "a")
        began = now()
        await first.acquire()
        assert now() - began <= 10.0 / 3 + 2.41
        assert store.spec["holderIdentity"] == "a"

    virtual(main)


def test_release_does_not_wait_for_an_api_server_that_hangs() -> None:
    async def main() -> None:
        store, down = Store(), ""
        first = contender(Link(store, lambda: (0.0, 0.0, down)), "a")
        await first.acquire()
        down, began = "request", now()
        await first.release()
        assert now() - began <= 3.01

    virtual(main)


@pytest.mark.parametrize("times", [{"give_up_s": 15.0}, {"renew_every_s": 6.0}, {"renew_every_s": 0.0}])
def test_times_that_break_the_promise_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        contender(Link(Store()), "a", **times)


def test_an_empty_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="identity"):
        contender(Link(Store()), "")


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(2, 4), st.floats(6.0, 14.99))
def test_two_never_hold_at_once_and_in_the_end_one_does(seed: int, count: int, give_up_s: float) -> None:
    """Calls that are late, lost or refused, processes that die, clocks that disagree."""
    chance = random.Random(seed)
    calm = False

    cut: dict[str, tuple[float, str]] = {}

    def trouble(identity: str) -> tuple[float, float, str]:
        if calm:
            return 0.01, 0.01, ""
        until, lost = cut.get(identity, (0.0, ""))
        if now() < until:
            return 0.01, 0.01, lost
        if chance.random() < 0.03:
            cut[identity] = now() + chance.uniform(5.0, 40.0), chance.choice(["request", "answer"])
        lost = chance.choices(["", "request", "answer", "Unreachable"], [80, 6, 8, 6])[0]
        slow = chance.random() < 0.1
        scale = 12.0 if slow else 0.5
        return chance.random() * scale, chance.random() * scale, lost

    async def main() -> None:
        nonlocal calm
        store, holders = Store(), set[str]()
        acquired = 0

        async def process(identity: str) -> None:
            nonlocal acquired
            offset = chance.uniform(-900.0, 900.0)
            leadership = contender(
                Link(store, lambda: trouble(identity)), identity, give_up_s=give_up_s, clock=lambda: now() + offset
            )
            kind = chance.choice(["stops", "stops", "stays"])
            lives_s = chance.uniform(5.0, 120.0)
            try:
                async with asyncio.timeout(lives_s if kind == "stops" and not calm else None):
                    await leadership.acquire()
                    acquired += 1
                    holders.add(identity)
                    assert holders == {identity}
                    await leadership.hold()
            except (TimeoutError, LeaseLost):
                holders.discard(identity)
                if chance.random() < 0.5:
                    await leadership.release()
            finally:
                holders.discard(identity)

        async def restarted(number: int) -> None:
            for life in range(1_000_000):
                await process(f"{number}-{life}")
                await asyncio.sleep(chance.uniform(0.0, 5.0))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(restarted(number)) for number in range(count)]
            await asyncio.sleep(600.0)
            assert acquired > 3
            calm = True
            await asyncio.sleep(200.0)
            assert len(holders) == 1
            for running in tasks:
                running.cancel()

    virtual(main)


def test_a_process_that_was_stopped_is_told_so_before_it_writes() -> None:
    async def main() -> None:
        stopped_for = 0.0
        leader = contender(Link(Store()), "a", clock=lambda: now() + stopped_for)
        with pytest.raises(LeaseLost):
            leader.check()
        await leader.acquire()
        leader.check()
        stopped_for = 9.0
        leader.check()
        stopped_for = 11.0  # others may not act for 4 s yet, but a call takes its time
        with pytest.raises(LeaseLost, match="10 s"):
            leader.check()

    virtual(main)
