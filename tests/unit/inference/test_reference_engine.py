"""The engine thread, on a tiny model and on a decoder that the test holds in its hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight_runtime.inference.reference.decoder import LlamaDecoder, load_model
from inflight_runtime.inference.reference.engine import Engine, EngineError, Job
from inflight_runtime.inference.reference.sampling import generate_one
from inflight_runtime.inference.service import Load
from inflight_runtime.types import Version
from support.tiny_models import make_tiny_model

PROMPT = [7, 8, 9]


class StepDecoder:
    """Samples token 1 always; each step waits for a permit when the gate is closed."""

    def __init__(self) -> None:
        self.prefills: list[list[int]] = []
        self.permits = threading.Semaphore(10**6)
        self.fail = False

    def hold(self) -> None:
        self.permits = threading.Semaphore(0)

    def step(self, ids: list[int], cache: Any) -> tuple[torch.Tensor, Any]:
        assert self.permits.acquire(timeout=20)
        if self.fail:
            raise ValueError("the decoder is unwell")
        if cache is None:
            self.prefills.append(list(ids))
        return torch.tensor([float("-inf"), 0.0]), (cache or 0) + len(ids)


@pytest.fixture
def decoder() -> StepDecoder:
    return StepDecoder()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(decoder: Any, **options: Any) -> Engine:
        engine = Engine(decoder, **({"max_concurrent": 8} | options))
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await asyncio.to_thread(engine.stop)


def job(engine: Engine, n: int = 1, max_tokens: int = 5, seeds: list[int] | None = None, **fields: Any) -> Job:
    settings: dict[str, Any] = {"prompt_ids": PROMPT, "temperature": 1.0, "stop_ids": frozenset()}
    return Job(answers=engine.make_answers(n, seeds), max_tokens=max_tokens, **(settings | fields))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  another thread brings it about
            await asyncio.sleep(0.002)


async def test_an_answer_is_the_same_whatever_else_runs(tmp_path: Path, start: Callable[..., Engine]) -> None:
    model = load_model(make_tiny_model(tmp_path, initializer_range=0.1))
    engine = start(LlamaDecoder(model), max_concurrent=5)
    jobs = [job(engine, n=3, max_tokens=10 + 7 * i, seeds=[i, 100 + i, 3], prompt_ids=[i, *PROMPT]) for i in range(6)]
    await asyncio.gather(*(engine.generate(one) for one in jobs))
    for i, one in enumerate(jobs):
        for answer in one.answers:
            expected = generate_one(model, [i, *PROMPT], 10 + 7 * i, 1.0, answer.seed, ())
            assert (answer.ids, answer.logprobs) == expected
            assert answer.finish == "length"


async def test_answers_of_one_prompt_share_its_prefill(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder, max_concurrent=2)
    one = job(engine, n=6)
    await engine.generate(one)
    assert decoder.prefills == [PROMPT]
    assert [answer.ids for answer in one.answers] == [[1] * 5] * 6


async def test_an_answer_admitted_after_an_update_has_a_prefill_of_the_new_weights(
    decoder: StepDecoder, start: Callable[..., Engine]
) -> None:
    engine = start(decoder, max_concurrent=1)
    await engine.set_version(Version(1, 0))
    decoder.hold()
    one = job(engine, n=2, max_tokens=2)
    running = asyncio.create_task(engine.generate(one))
    await until(lambda: engine.load() == Load(running=1, waiting=1))
    update = asyncio.create_task(engine.set_version(Version(1, 1)))
    await asyncio.sleep(0)
    decoder.permits.release(100)
    await asyncio.gather(running, update)
    assert decoder.prefills == [PROMPT, PROMPT]
    assert one.answers[1].versions == [Version(1, 1)] * 2


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_an_update_labels_the_next_token_and_treats_the_cache_as_told(
    decoder: StepDecoder, start: Callable[..., Engine], kv_cache: str
) -> None:
    engine = start(decoder, kv_cache=kv_cache)
    await engine.set_version(Version(1, 0))
    decoder.hold()
    one = job(engine, max_tokens=6)
    running = asyncio.create_task(engine.generate(one))
    decoder.permits.release(3)
    await until(lambda: len(one.answers[0].ids) == 3)
    commands = asyncio.gather(engine.pause(), engine.set_version(Version(1, 1)), engine.resume())
    await asyncio.sleep(0)
    decoder.permits.release(100)  # the step that was waiting for its permit belongs to the old weights
    await commands
    await running
    versions = one.answers[0].versions
    switch = versions.index(Version(1, 1))
    assert versions == [Version(1, 0)] * switch + [Version(1, 1)] * (6 - switch)
    assert 3 <= switch <= 5
    again = [PROMPT + [1] * switch] if kv_cache == "recompute" else []
    assert decoder.prefills == [PROMPT, *again]


async def test_recomputing_equals_a_fresh_generation_from_the_same_prefix(
    tmp_path: Path, start: Callable[..., Engine]
) -> None:
    old = load_model(make_tiny_model(tmp_path / "old", seed=0, initializer_range=0.1))
    new = load_model(make_tiny_model(tmp_path / "new", seed=1, initializer_range=0.1))
    found: dict[str, Any] = {}
    for kv_cache in ("keep", "recompute"):
        model = load_model(tmp_path / "old")
        engine = start(LlamaDecoder(model), kv_cache=kv_cache, slow_token_s=0.002)

        def swap(model: Any = model) -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(new.get_parameter(name))

        one = job(engine, max_tokens=60, seeds=[5])
        await engine.set_version(Version(1, 0))
        running = asyncio.create_task(engine.generate(one))
        await until(lambda one=one: len(one.answers[0].ids) >= 5)
        await engine.pause()
        await engine.call(swap)
        await engine.set_version(Version(1, 1))
        await engine.resume()
        await running
        found[kv_cache] = one.answers[0]
    for kv_cache, answer in found.items():
        switch = answer.versions.index(Version(1, 1))
        assert (answer.ids[:switch], answer.logprobs[:switch]) == tuple(
            part[:switch] for part in generate_one(old, PROMPT, 60, 1.0, 5, ())
        )
        with torch.no_grad():
            logits = new(torch.tensor([PROMPT + answer.ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        difference = (torch.tensor(answer.logprobs) - expected)[switch:].abs()
        assert (difference.max() < 1e-5) == (kv_cache == "recompute")


async def test_nothing_is_sampled_while_paused(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder)
    await engine.pause()
    one = job(engine)
    running = asyncio.create_task(engine.generate(one))
    await until(lambda: engine.load() == Load(running=0, waiting=1))
    await engine.call(lambda: None)
    assert decoder.prefills == []
    await engine.resume()
    await running
    assert engine.load() == Load()


async def test_no_more_than_the_bound_run_at_once(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder, max_concurrent=3)
    decoder.hold()
    await engine.pause()
    running = [asyncio.create_task(engine.generate(job(engine, n=2))) for _ in range(4)]
    await until(lambda: engine.load() == Load(running=0, waiting=8))
    await engine.resume()
    decoder.permits.release(2)  # one prefill for the first two answers, one for the third
    await until(lambda: engine.load() == Load(running=3, waiting=5))
    decoder.permits.release(1000)
    await asyncio.gather(*running)
    assert engine.load() == Load()


async def test_a_cancelled_request_leaves_the_engine(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder)
    decoder.hold()
    running = asyncio.create_task(engine.generate(job(engine, n=4, max_tokens=10**6)))
    await until(lambda: engine.load().waiting == 3)
    running.cancel()
    decoder.permits.release(10**6)
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: engine.load() == Load())
    await engine.generate(job(engine))


async def test_an_abort_ends_all_requests_with_the_reason(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder, max_concurrent=1)
    decoder.hold()
    await engine.pause()
    running = [asyncio.create_task(engine.generate(job(engine, max_tokens=10**6))) for _ in range(3)]
    await until(lambda: engine.load().waiting == 3)
    await engine.resume()
    await until(lambda: engine.load() == Load(running=1, waiting=2))
    abort = asyncio.create_task(engine.abort_all("weights are mixed"))
    await asyncio.sleep(0)
    decoder.permits.release(10**6)
    await abort
    for one in running:
        with pytest.raises(EngineError, match="weights are mixed"):
            await one
    assert engine.load() == Load()


async def test_a_failing_model_ends_its_requests_and_is_reported(
    decoder: StepDecoder, start: Callable[..., Engine]
) -> None:
    reasons: list[str] = []
    engine = start(decoder, on_failure=reasons.append)
    decoder.fail = True
    with pytest.raises(EngineError, match="the decoder is unwell"):
        await engine.generate(job(engine))
    await until(lambda: bool(reasons))
    assert "the decoder is unwell" in reasons[0]
    with pytest.raises(EngineError):
        await engine.pause()


async def test_a_stopped_engine_ends_its_requests(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder)
    running = asyncio.create_task(engine.generate(job(engine, max_tokens=10**7)))
    await until(lambda: engine.load().running == 1)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineError, match="shutting down"):
        await running


async def test_a_full_queue_refuses(decoder: StepDecoder, start: Callable[..., Engine]) -> None:
    engine = start(decoder, max_waiting=1)
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(job(engine)))
    await until(lambda: engine.load().waiting == 1)
    with pytest.raises(EngineError, match="waiting already"):
        await engine.generate(job(engine))
    await engine.resume()
    await waiting


async def test_an_error_inside_a_command_goes_to_its_caller_alone(
    decoder: StepDecoder, start: Callable[..., Engine]
) -> None:
    engine = start(decoder)

    def broken() -> None:
        raise KeyError("no such tensor")

    with pytest.raises(KeyError):
        await engine.call(broken)
    await engine.generate(job(engine))
