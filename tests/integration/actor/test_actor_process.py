"""A real actor process against a real coordinator process; the inference server is a stub over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.protocol import GenerateRequest, MemberBeat, MemberState, StepCommit, TrainerStart, VersionField
from inflight_runtime.types import Group
from support.actor_fakes import StubServer, make_actor_config
from support.coordinators import (
    TOKEN,
    RunningCoordinator,
    coordinator,
    coordinator_config,
    start_coordinator,
)
from support.ports import free_port
from support.tiny_models import make_tokenizer

DEADLINE_S = 120.0
START = VersionField(epoch=1, step=0)

ENVIRONMENT = """
import os, time
from inflight_runtime.actor import SingleTurnEnvironment

class Task(SingleTurnEnvironment):
    def __init__(self, wrong="nothing"):
        self.wrong = wrong
        self.problems = [f"problem {number}" for number in range(40)]
    def messages(self, problem):
        if self.wrong == "long" and problem.endswith("7"):
            return "x" * 1000
        return [{"role": "user", "content": problem}]
    def reward(self, problem, answer):
        if self.wrong == "raises":
            raise LookupError("no reference answer")
        return {"reward": len(answer.text), "length": len(answer.token_ids)}
"""


@dataclass
class World:
    """A coordinator process, a stub server that it knows, and the trainer's side of the protocol."""

    directory: Path
    coordinator: RunningCoordinator
    client: CoordinatorClient
    server: StubServer
    tokenizer_dir: Path

    def actor_config_file(self, number: int = 0, wrong: str = "nothing", **changes) -> Path:
        config = make_actor_config(
            actor_id=f"actor-{number}",
            coordinator_url=self.coordinator.url,
            token_file=self.coordinator.config.token_file,
            model={"path": str(self.tokenizer_dir), "tokenizer": str(self.tokenizer_dir)},
            environment={
                "entrypoint": "actor_process_env:Task",
                "args": {"wrong": wrong},
                "search_path": (str(self.directory),),
                "attempt_retries": 0,
                "max_consecutive_failures": 3,
            },
            **({"group_size": 2, "concurrency": 4} | changes),
        )
        file = self.directory / f"actor-{number}.json"
        file.write_text(config.model_dump_json())
        return file

    @contextlib.asynccontextmanager
    async def actor(self, number: int = 0, **changes) -> AsyncIterator[asyncio.subprocess.Process]:
        file = self.actor_config_file(number, **changes)
        with file.with_suffix(".log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "inflight_runtime.actor",
                "--config",
                str(file),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def log(self, number: int = 0) -> str:
        return (self.directory / f"actor-{number}.log").read_text(errors="replace")

    async def beat(self) -> None:
        """What the server would do: say that it is there."""
        await self.client.beat(
            MemberBeat(
                server_id=self.server.server_id,
                boot_id=self.server.boot_id,
                url=self.server.url,
                engine="reference",
                capacity=16,
                max_length=256,
                version=START,
            )
        )

    async def keep_alive(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.5)

    async def make_ready(self, epoch: int | None = None) -> int:
        """What the trainer and its publisher would do; returns the trainer's epoch."""
        if epoch is None:
            epoch = (await self.client.start_trainer(TrainerStart(resume_step=0))).epoch
        await self.beat()
        await self.client.set_member_state(
            self.server.server_id, MemberState(epoch=epoch, boot_id=self.server.boot_id, state="READY", version=START)
        )
        return epoch

    async def train(self, steps: range, epoch: int) -> list[Group]:
        """What the trainer would do with the batches: nothing but commit them."""
        trained: list[Group] = []
        for step in steps:
            batch = None
            while batch is None:
                batch = await self.client.batch(step, epoch, 5.0)
            trained += batch.groups
            await self.client.commit(step, StepCommit(epoch=epoch))
        return trained

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return directory


@contextlib.asynccontextmanager
async def world(directory: Path, tokenizer_dir: Path, **changes) -> AsyncIterator[World]:
    (directory / "actor_process_env.py").write_text(ENVIRONMENT)
    config = coordinator_config(directory, port=free_port(), lease_ttl_s=5.0, member_ttl_s=30.0, **changes)
    server = StubServer(token=TOKEN, version=START)
    with coordinator(directory, config) as running:
        async with asyncio.timeout(DEADLINE_S), CoordinatorClient(running.url, TOKEN) as client:
            await server.start()
            here = World(directory, running, client, server, tokenizer_dir)
            beats = asyncio.create_task(here.keep_alive())
            try:
                yield here
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
                await server.stop()


async def test_an_actor_feeds_a_run_to_its_end(tmp_path, tokenizer_dir):
    async with world(tmp_path, tokenizer_dir) as here, here.actor() as actor:
        epoch = await here.make_ready()
        trained = await here.train(range(1, 11), epoch)
        assert await actor.wait() == 0, here.log()
        state = await here.client.state()
    assert state.outcome == "succeeded"
    assert len(trained) == 20
    assert len({group.group_id for group in trained}) == 20
    tokenizer = make_tokenizer()
    for group in trained:
        text = f"<|im_start|>user\nproblem {group.problem_index}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(group.prompt_ids.tolist()) == text == group.prompt_text
        for attempt in group.attempts:
            assert attempt.ok
            assert attempt.reward == len(attempt.text)
            assert attempt.parts["length"] == attempt.sampled_tokens


async def test_sigterm_hands_the_leases_back_and_another_actor_takes_them(tmp_path, tokenizer_dir):
    gate = asyncio.Event()

    async def wait(_: GenerateRequest) -> None:
        await gate.wait()

    async with world(tmp_path, tokenizer_dir) as here:
        here.server.behave = wait
        async with here.actor() as first:
            epoch = await here.make_ready()
            await here.until(lambda: len(here.server.requests) == 4 or first.returncode is not None)
            held = (await here.client.state()).groups["leased"]
            first.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await first.wait() == 143, here.log()
            state = await here.client.state()
        assert held == 4
        assert state.leases_expired == 0
        gate.set()
        async with here.actor(1) as second:
            trained = await here.train(range(1, 11), epoch)
            assert await second.wait() == 0, here.log(1)
    assert len({group.group_id for group in trained}) == 20


async def test_an_environment_that_always_raises_ends_the_run_with_its_words(tmp_path, tokenizer_dir):
    async with world(tmp_path, tokenizer_dir) as here, here.actor(wrong="raises") as actor:
        await here.make_ready()
        assert await actor.wait() == 1, here.log()
        state = await here.client.state()
    assert state.outcome == "failed"
    assert "actor_process_env:Task" in state.reason
    assert "LookupError: no reference answer (actor_process_env.py:" in state.reason
    assert "in reward)" in state.reason


async def test_an_environment_that_cannot_be_loaded_ends_the_run_with_exit_code_2(tmp_path, tokenizer_dir):
    async with world(tmp_path, tokenizer_dir) as here:
        (tmp_path / "actor_process_env.py").write_text("import no_such_module\n")
        async with here.actor() as actor:
            assert await actor.wait() == 2, here.log()
        state = await here.client.state()
    assert state.outcome == "failed"
    assert "'no_such_module', which is not installed" in state.reason
    assert "Traceback" not in here.log()


async def test_prompts_that_are_too_long_are_counted_and_passed_over(tmp_path, tokenizer_dir):
    async with world(tmp_path, tokenizer_dir, shuffle=False) as here, here.actor(wrong="long") as actor:
        epoch = await here.make_ready()
        trained = await here.train(range(1, 11), epoch)
        assert await actor.wait() == 0, here.log()
        state = await here.client.state()
    assert {group.problem_index % 10 for group in trained} == set(range(10)) - {7}
    assert state.dropped["prompt_too_long"] == 2


async def test_the_coordinator_may_be_killed_and_restarted_under_an_actor(tmp_path, tokenizer_dir):
    async def slowly(_: GenerateRequest) -> None:
        await asyncio.sleep(0.05)

    async with world(tmp_path, tokenizer_dir) as here, here.actor() as actor:
        here.server.behave = slowly
        epoch = await here.make_ready()
        trained = await here.train(range(1, 5), epoch)
        here.coordinator.kill()
        restarted = await asyncio.to_thread(start_coordinator, tmp_path, here.coordinator.config)
        try:
            await here.make_ready(epoch)
            trained += await here.train(range(5, 11), epoch)
            assert await actor.wait() == 0, here.log()
        finally:
            restarted.kill()
    assert len(trained) == 20
    assert len({group.group_id for group in trained}) == 20


async def test_a_killed_actor_costs_nothing_but_time(tmp_path, tokenizer_dir):
    blocked = asyncio.Event()

    async def hang(_: GenerateRequest) -> None:
        await blocked.wait()

    async with world(tmp_path, tokenizer_dir) as here:
        here.server.behave = hang
        async with here.actor() as first:
            epoch = await here.make_ready()
            await here.until(lambda: len(here.server.requests) == 4 or first.returncode is not None)
            first.kill()
            await first.wait()
        here.server.behave = None
        blocked.set()
        async with here.actor(1) as second:
            trained = await here.train(range(1, 11), epoch)
            assert await second.wait() == 0, here.log(1)
        state = await here.client.state()
    assert len({group.group_id for group in trained}) == 20
    assert state.leases_expired == 4
    assert state.groups["submitted"] == sum(count for name, count in state.groups.items() if name != "submitted")


async def test_two_actors_share_the_work_without_doing_any_twice(tmp_path, tokenizer_dir):
    async def slowly(_: GenerateRequest) -> None:
        await asyncio.sleep(0.02)

    async with world(tmp_path, tokenizer_dir, max_staleness=4) as here:
        here.server.behave = slowly
        async with here.actor(0, concurrency=2) as first, here.actor(1, concurrency=2) as second:
            epoch = await here.make_ready()
            trained = await here.train(range(1, 11), epoch)
            assert await first.wait() == 0, here.log(0)
            assert await second.wait() == 0, here.log(1)
        state = await here.client.state()
    assert len({group.group_id for group in trained}) == 20
    assert state.duplicates == 0
    assert state.fenced == 0


def test_a_broken_config_file_is_refused_with_exit_code_2(tmp_path):
    file = tmp_path / "actor.json"
    file.write_text('{"job": "x", "no_such_field": 1}')
    done = subprocess.run(
        [sys.executable, "-m", "inflight_runtime.actor", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "no_such_field" in done.stderr
    assert "Traceback" not in done.stderr
