"""The actor's loop against a coordinator in memory and stub servers: what becomes of each group, and how it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from inflight_runtime.actor import Answer, Environment, Reward, SingleTurnEnvironment
from inflight_runtime.actor.loop import FAILED, SUCCEEDED, TERMINATED, Actor
from support.actor_fakes import CharCodec, FakeCoordinator, StubServer, make_actor_config, running


class Letters(SingleTurnEnvironment):
    """Counts letters; a test overrides what goes wrong."""

    def problem(self, index):
        return index

    def messages(self, problem):
        return [{"role": "user", "content": f"problem {problem}"}]

    def reward(self, problem, answer: Answer):
        return {"reward": float(len(answer.text)), "ended": answer.finish == "stop"}


def make_actor(coordinator: FakeCoordinator, played: Environment, **changes) -> tuple[Actor, asyncio.Event]:
    stop = asyncio.Event()
    actor = Actor(
        make_actor_config(**changes),
        played,
        CharCodec(),
        coordinator=coordinator,
        token=StubServer().token,
        stop=stop,
    )
    return actor, stop


async def run(groups: int, played: Environment, server: StubServer | None = None, *, fake=None, **changes):
    server = server or StubServer()
    async with running(server):
        coordinator = FakeCoordinator(groups, [server.member()], **(fake or {}))
        actor, _ = make_actor(coordinator, played, **changes)
        async with asyncio.timeout(60):
            code = await actor.run()
    return code, coordinator


async def test_every_leased_group_is_played_and_handed_in():
    server = StubServer()
    code, coordinator = await run(10, Letters(), server)
    assert code == SUCCEEDED
    assert sorted(coordinator.groups) == list(range(10))
    group = coordinator.groups[3]
    assert len(group.survivors) == 4
    assert CharCodec().decode(group.prompt_ids.tolist(), special=True) == "<user>problem 3§<assistant>"
    assert group.prompt_text == "<user>problem 3§<assistant>"
    for attempt in group.attempts:
        assert attempt.reward == len(attempt.text)
        assert attempt.parts == {"ended": 1.0 if attempt.finish == "stop" else 0.0}
        assert {(span.server, span.boot_id) for span in attempt.spans()} == {("s0", "b0")}
    assert coordinator.dataset is not None
    assert (coordinator.dataset.size, coordinator.dataset.eval_size) == (None, 0)
    assert len(server.requests) == 10  # one request for a group of four
    assert coordinator.lease_requests < 10 + 3


async def test_a_run_repeats_itself():
    results = []
    for _ in range(2):
        _, coordinator = await run(4, Letters())
        results.append([[a.text for a in coordinator.groups[index].attempts] for index in range(4)])
    assert results[0] == results[1]


async def test_held_out_problems_come_from_the_held_out_split():
    class Split(Letters):
        def eval_problem(self, index):
            return f"held out {index}"

    _, coordinator = await run(2, Split(), fake={})
    assert "problem 0" in coordinator.groups[0].prompt_text
    server = StubServer()
    async with running(server):
        coordinator = FakeCoordinator(2, [server.member()])
        coordinator.kind = "eval"
        actor, _ = make_actor(coordinator, Split())
        assert await actor.run() == SUCCEEDED
    assert "problem held out 1" in coordinator.groups[1].prompt_text


async def test_a_reward_that_raises_once_in_a_while_costs_nothing_but_a_retry():
    class Flaky(Letters):
        calls = 0

        def reward(self, problem, answer):
            type(self).calls += 1
            if self.calls in (2, 7):
                raise ConnectionError("the sandbox was busy")
            return 1.0

    code, coordinator = await run(4, Flaky())
    assert code == SUCCEEDED
    assert all(len(group.survivors) == 4 for group in coordinator.groups.values())


async def test_an_attempt_that_always_raises_is_counted_as_failed_and_its_group_goes_on():
    class Picky(Environment):
        def problem(self, index):
            return index

        async def rollout(self, problem, client):
            answer = await client.ask("go")
            if client.attempt == 2:
                raise ValueError("cannot judge this one")
            return float(len(answer.text))

    server = StubServer()
    code, coordinator = await run(2, Picky(), server, environment={"attempt_retries": 1})
    assert code == SUCCEEDED
    for group in coordinator.groups.values():
        assert [attempt.ok for attempt in group.attempts] == [True, True, False, True]
        assert "ValueError: cannot judge this one (test_loop.py:" in group.attempts[2].error
    assert len(server.requests) == 4  # each group once for four and once for the retry


async def test_a_reward_that_hangs_on_one_problem_costs_that_attempt_only():
    release = threading.Event()

    class Hangs(Letters):
        def problem(self, index):
            return index

        def reward(self, problem, answer):
            if problem == 1:
                release.wait(60)
            return 1.0

    settings = {"reward_timeout_s": 0.3, "attempt_retries": 0}
    code, coordinator = await run(5, Hangs(), environment=settings)
    release.set()
    assert code == SUCCEEDED
    assert [len(coordinator.groups[index].survivors) for index in range(5)] == [4, 0, 4, 4, 4]
    assert "reward did not return within 0.3 s" in coordinator.groups[1].attempts[0].error


@pytest.mark.parametrize("stubborn", [False, True], ids=["ends when cancelled", "swallows its cancellation"])
async def test_a_rollout_that_does_not_end_is_given_up(stubborn):
    class Endless(Environment):
        def problem(self, index):
            return index

        async def rollout(self, problem, client):
            await client.ask("go")
            if problem == 0 and client.attempt == 1:
                for _ in range(3 if stubborn else 1):
                    try:
                        await asyncio.sleep(3.0 if stubborn else 600.0)
                    except asyncio.CancelledError:
                        if not stubborn:
                            raise
            return 1.0

    settings = {"rollout_timeout_s": 0.4, "attempt_retries": 0}
    code, coordinator = await run(2, Endless(), environment=settings)
    assert code == SUCCEEDED
    assert [attempt.ok for attempt in coordinator.groups[0].attempts] == [True, False, True, True]
    assert "did not end within 0.4 s" in coordinator.groups[0].attempts[1].error
    assert len(coordinator.groups[1].survivors) == 4


async def test_a_problem_that_cannot_be_made_fails_its_group_only():
    class Missing(Letters):
        def problem(self, index):
            if index == 1:
                raise FileNotFoundError("image-1.png")
            return index

    code, coordinator = await run(3, Missing())
    assert code == SUCCEEDED
    assert [len(coordinator.groups[index].survivors) for index in range(3)] == [4, 0, 4]
    assert "FileNotFoundError: image-1.png" in coordinator.groups[1].attempts[0].error


async def test_an_environment_that_always_raises_ends_the_run_with_the_reason():
    class Broken(Letters):
        def reward(self, problem, answer):
            return answer.no_such_field

    settings = {"attempt_retries": 0, "max_consecutive_failures": 3, "entrypoint": "mine:Broken"}
    code, coordinator = await run(50, Broken(), environment=settings, concurrency=2)
    assert code == FAILED
    assert coordinator.failure is not None
    assert coordinator.failure.source == "actor-0"
    reason = coordinator.failure.reason
    assert "mine:Broken" in reason
    assert "3 groups in a row" in reason
    assert "AttributeError" in reason
    assert "no_such_field" in reason
    assert "test_loop.py" in reason
    assert "in reward" in reason


async def test_failures_that_are_not_in_a_row_do_not_end_the_run():
    class EverySecond(Letters):
        def reward(self, problem, answer):
            if problem % 2:
                raise ValueError("odd")
            return 1.0

    settings = {"attempt_retries": 0, "max_consecutive_failures": 2}
    code, coordinator = await run(8, EverySecond(), environment=settings, concurrency=1)
    assert code == SUCCEEDED
    assert len(coordinator.groups) == 8


class Wordy(Letters):
    def messages(self, problem):
        return "x" * (300 if problem == 1 else 3)


async def test_a_prompt_that_is_too_long_is_dropped_with_the_numbers():
    server = StubServer()
    code, coordinator = await run(3, Wordy(), server)
    assert code == SUCCEEDED
    assert sorted(coordinator.groups) == [0, 2]
    drop = coordinator.dropped[1]
    assert drop.reason == "prompt_too_long"
    assert drop.fence == 1
    assert "problem 1" in drop.detail
    assert "300 tokens" in drop.detail
    assert len(server.requests) == 2


async def test_a_prompt_that_is_too_long_ends_the_run_where_the_job_says_so():
    code, coordinator = await run(3, Wordy(), environment={"overlong_prompt": "fail"})
    assert code == FAILED
    assert coordinator.failure is not None
    assert "300 tokens" in coordinator.failure.reason
    assert "overlongPrompt" in coordinator.failure.reason


async def test_leases_are_kept_alive_and_lost_ones_given_up():
    gate = asyncio.Event()
    server = StubServer()

    async def wait(_):
        await gate.wait()

    server.behave = wait
    async with running(server):
        coordinator = FakeCoordinator(3, [server.member()], ttl_s=0.3)
        actor, _ = make_actor(coordinator, Letters())
        task = asyncio.create_task(actor.run())
        await coordinator.until(lambda: len(server.requests) == 3)
        await coordinator.until(lambda: coordinator.renewals >= 2)
        coordinator.lost.add(1)
        await coordinator.until(lambda: len(actor._work) == 2)
        gate.set()
        async with asyncio.timeout(30):
            assert await task == SUCCEEDED
    assert sorted(coordinator.groups) == [0, 2]


async def test_a_group_that_was_fenced_off_is_forgotten():
    server = StubServer()
    async with running(server):
        coordinator = FakeCoordinator(3, [server.member()])
        coordinator.fenced.add(1)
        actor, _ = make_actor(coordinator, Letters())
        async with asyncio.timeout(30):
            assert await actor.run() == SUCCEEDED
    assert sorted(coordinator.groups) == [0, 2]


async def test_being_told_to_stop_hands_the_leases_back():
    server = StubServer()
    never = asyncio.Event()

    async def hang(_):
        await never.wait()

    server.behave = hang
    async with running(server):
        coordinator = FakeCoordinator(3, [server.member()])
        actor, stop = make_actor(coordinator, Letters())
        task = asyncio.create_task(actor.run())
        await coordinator.until(lambda: len(server.requests) == 3)
        stop.set()
        async with asyncio.timeout(30):
            assert await task == TERMINATED
        never.set()
    assert sorted(coordinator.released) == [0, 1, 2]
    assert coordinator.groups == {}


async def test_a_rollout_that_samples_nothing_has_nothing_to_train_on():
    class Silent(Environment):
        def problem(self, index):
            return index

        async def rollout(self, problem, client):
            return 1.0

    code, coordinator = await run(1, Silent(), environment={"attempt_retries": 0})
    assert code == SUCCEEDED
    assert "has not sampled a single token" in coordinator.groups[0].attempts[0].error


async def test_several_turns_make_one_segment_with_what_the_environment_said_masked_out():
    class Guess(Environment):
        def problem(self, index):
            return index

        async def rollout(self, problem, client):
            messages = [{"role": "user", "content": f"guess {problem}"}]
            turns = 0
            for _ in range(3):
                done = await client.chat.completions.create(messages=messages)
                turns += 1
                messages += [done.choices[0].message, {"role": "user", "content": "again"}]
            return Reward(1.0, {"turns": turns})

    server = StubServer()
    code, coordinator = await run(1, Guess(), server)
    assert code == SUCCEEDED
    assert sum(request.n for request in server.requests) == 12
    for attempt in coordinator.groups[0].attempts:
        (segment,) = attempt.segments
        assert segment.shares_prompt
        assert len(segment.spans) == 3
        assert not segment.mask.all()
        assert "[" in attempt.text
        assert attempt.parts == {"turns": 3.0}


async def test_health_routes_tell_readiness_and_counters():
    import aiohttp

    from support.ports import free_port

    server = StubServer()
    gate = asyncio.Event()

    async def wait(_):
        await gate.wait()

    server.behave = wait
    port = free_port()
    async with running(server), aiohttp.ClientSession() as session:
        coordinator = FakeCoordinator(1, [server.member()])
        actor, _ = make_actor(coordinator, Letters(), health_port=port)
        task = asyncio.create_task(actor.run())
        await coordinator.until(lambda: len(server.requests) == 1)
        base = f"http://127.0.0.1:{port}"
        async with session.get(f"{base}/healthz") as reply:
            assert reply.status == 200
        async with session.get(f"{base}/readyz") as reply:
            assert reply.status == 200
        async with session.get(f"{base}/metrics") as reply:
            assert "inflight_actor_groups_active 1.0" in await reply.text()
        gate.set()
        async with asyncio.timeout(30):
            assert await task == SUCCEEDED
