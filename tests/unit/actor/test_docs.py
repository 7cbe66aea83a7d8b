"""The code in docs/environments.md runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from inflight_runtime.actor import Answer, Environment
from inflight_runtime.actor.loop import SUCCEEDED, Actor
from inflight_runtime.protocol import GenerateRequest
from support.actor_fakes import CharCodec, FakeCoordinator, StubServer, make_actor_config, make_completion, running

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "environments.md"


def defined() -> dict[str, Any]:
    """What the guide's self-contained blocks define."""
    names: dict[str, Any] = {"Answer": Answer}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S):
        if "import" in block or "assert" in block:
            exec(block, names)
    return names


async def play(environment: Environment, text: str) -> FakeCoordinator:
    server = StubServer()

    async def say(request: GenerateRequest) -> Any:
        ids = [*CharCodec().encode(text), 0]
        return server.reply([make_completion(ids)] * request.n)

    server.behave = say
    async with running(server):
        coordinator = FakeCoordinator(1, [server.member()])
        config = make_actor_config(sampling={"max_tokens": 16}, model={"max_length": 1024})
        actor = Actor(
            config, environment, CharCodec(), coordinator=coordinator, token=server.token, stop=asyncio.Event()
        )
        async with asyncio.timeout(60):
            assert await actor.run() == SUCCEEDED
    return coordinator


async def test_the_guides_single_turn_environment_is_scored():
    coordinator = await play(defined()["Capitals"](), "Paris")
    assert [attempt.reward for attempt in coordinator.groups[0].attempts] == [1.0] * 4
    assert coordinator.groups[0].attempts[0].parts == {"exact": 1.0, "words": 1.0}


async def test_the_guides_multi_turn_environment_plays_to_the_end():
    environment = defined()["GuessTheNumber"]()
    number = environment.problem(0)
    right = await play(environment, str(number))
    assert right.groups[0].attempts[0].parts == {"turns": 1.0}
    wrong = await play(environment, "0")
    attempt = wrong.groups[0].attempts[0]
    assert attempt.parts == {"turns": 8.0}
    assert len(attempt.segments) == 1
    assert len(list(attempt.spans())) == 8
    assert attempt.text.count("higher") == 7


def test_every_class_of_the_guide_is_the_one_that_is_exported():
    import inflight_runtime.actor as exported

    names = set(re.findall(r"from inflight_runtime\.actor import (.*)", GUIDE.read_text()))
    assert names
    for name in {part.strip() for line in names for part in line.split(",")}:
        assert hasattr(exported, name), name
