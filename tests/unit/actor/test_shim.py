"""The OpenAI-like client: its objects, merged requests, refused sampling, lengths."""

from __future__ import annotations

import asyncio
import random

import pytest

from inflight_runtime.actor.blocking import BlockingBatcher, BlockingPool
from inflight_runtime.actor.coalesce import Coalescer
from inflight_runtime.actor.environments import PromptTooLongError
from inflight_runtime.actor.router import GenerationError, Route, Sampled
from inflight_runtime.actor.shim import GroupContext, RolloutClient, SamplingRefusedError
from inflight_runtime.actor.tokens import build_segments, sampling_seed
from inflight_runtime.config.roles import Sampling
from inflight_runtime.protocol import GenerateRequest
from inflight_runtime.types import Version
from support.actor_fakes import EOS, CharCodec, answer_ids, make_completion


class RecordingGenerator:
    """Answers like the stub server, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.cancelled = 0

    async def generate(self, request: GenerateRequest, route: Route) -> list[Sampled]:
        self.requests.append(request)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.error is not None:
            raise self.error
        assert request.seeds is not None
        return [Sampled(make_completion(answer_ids(seed, request.max_tokens)), "s0", "b0") for seed in request.seeds]


@pytest.fixture
def generator():
    return RecordingGenerator()


@pytest.fixture
def context(generator):
    pool = BlockingPool(threads=2)
    yield GroupContext(
        group_id=12,
        codec=CharCodec(),
        coalescer=Coalescer(generator, Route(Version(0, 0)), "a-12"),
        blocking=BlockingBatcher(pool),
        sampling=Sampling(max_tokens=6, seed=7, stop=("!",)),
        max_length=64,
        model_name="policy",
        reward_timeout_s=5.0,
    )
    pool.close()


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_completion_has_the_shape_that_openai_users_know(context):
    client = RolloutClient(context, attempt=0)
    done = await client.chat.completions.create(model="any", messages=ask("hi"), max_tokens=5, temperature=1.0)
    choice = done.choices[0]
    expected = answer_ids(sampling_seed(7, 12, 0, 0), 5)
    assert choice.message.role == "assistant"
    assert choice.message.content == CharCodec().decode(expected, special=False)
    assert choice.finish_reason in ("stop", "length")
    assert choice.token_ids == tuple(expected)
    assert done.usage.prompt_tokens == len("<user>hi§<assistant>")
    assert done.usage.total_tokens == done.usage.prompt_tokens + len(expected)
    assert done.model == "policy"


async def test_attempts_that_ask_the_same_in_one_turn_share_a_request(context, generator):
    clients = [RolloutClient(context, attempt) for attempt in range(8)]
    answers = await asyncio.gather(*(client.ask(ask("hi")) for client in clients))
    (request,) = generator.requests
    assert request.n == 8
    assert request.seeds == [sampling_seed(7, 12, attempt, 0) for attempt in range(8)]
    assert request.stop == ["!"]
    assert request.max_tokens == 6
    assert [list(answer.token_ids) for answer in answers] == [answer_ids(seed, 6) for seed in request.seeds]


async def test_merged_requests_are_in_the_order_of_the_attempts_however_they_are_scheduled(context, generator):
    clients = [RolloutClient(context, attempt) for attempt in range(6)]
    random.Random(1).shuffle(clients)
    await asyncio.gather(*(client.ask(ask("hi")) for client in clients))
    assert generator.requests[0].seeds == [sampling_seed(7, 12, attempt, 0) for attempt in range(6)]


async def test_different_prompts_and_parameters_are_not_merged(context, generator):
    one, two, three = (RolloutClient(context, attempt) for attempt in range(3))
    await asyncio.gather(one.ask(ask("hi")), two.ask(ask("ho")), three.ask(ask("hi"), max_tokens=2))
    assert sorted(request.n for request in generator.requests) == [1, 1, 1]


async def test_later_turns_have_seeds_of_their_own(context, generator):
    client = RolloutClient(context, attempt=3)
    messages = ask("hi")
    answer = await client.chat.completions.create(messages=messages)
    messages += [answer.choices[0].message, *ask("go on")]  # the message object goes back as it is
    await client.chat.completions.create(messages=messages)
    assert [request.seeds for request in generator.requests] == [
        [sampling_seed(7, 12, 3, 0)],
        [sampling_seed(7, 12, 3, 1)],
    ]
    prompt = CharCodec().encode("<user>hi§<assistant>")
    (segment,) = build_segments(client.recorder.histories, prompt)
    segment.validate()
    assert generator.requests[1].prompt_ids[: len(prompt)] == prompt


async def test_a_started_again_attempt_samples_anew(context, generator):
    await RolloutClient(context, 0, retry=0).ask(ask("hi"))
    await RolloutClient(context, 0, retry=1).ask(ask("hi"))
    assert generator.requests[0].seeds != generator.requests[1].seeds


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("top_p", 0.9, "top_p=0.9 is refused: rollouts are sampled by temperature alone"),
        ("top_k", 20, "top_k=20 is refused"),
        ("min_p", 0.1, "min_p=0.1 is refused"),
        ("frequency_penalty", 0.5, "is refused"),
        ("n", 4, "one answer a call"),
        ("seed", 1, "seeds from the run's seed"),
        ("stream", True, "is refused"),
        ("temperature", 0.7, "differs from the job's 1.0.*spec.sampling.temperature"),
        ("max_tokens", 7, "from 1 to the job's sampling.maxTokens"),
        ("max_tokens", 0, "from 1 to the job's sampling.maxTokens"),
        ("best_of", 2, "does not know 'best_of'"),
    ],
)
async def test_sampling_that_would_bias_training_is_refused(context, generator, parameter, value, message):
    client = RolloutClient(context, 0)
    with pytest.raises(SamplingRefusedError, match=message):
        await client.chat.completions.create(messages=ask("hi"), **{parameter: value})
    assert generator.requests == []


async def test_parameters_at_their_neutral_value_are_accepted(context, generator):
    client = RolloutClient(context, 0)
    await client.chat.completions.create(
        messages=ask("hi"), top_p=1.0, top_k=-1, n=1, temperature=1, seed=None, max_completion_tokens=3, stop="?"
    )
    assert generator.requests[0].max_tokens == 3
    assert generator.requests[0].stop == ["?"]


async def test_an_answer_is_cut_to_the_room_that_is_left(context, generator):
    await RolloutClient(context, 0).generate([1] * 61)
    assert generator.requests[0].max_tokens == 3


async def test_a_prompt_without_room_for_an_answer_is_told_apart_from_a_long_conversation(context):
    client = RolloutClient(context, 0)
    with pytest.raises(PromptTooLongError) as first:
        await client.generate([1] * 64)
    assert first.value.first
    await client.generate([1, 2])
    with pytest.raises(PromptTooLongError) as later:
        await client.generate([1] * 64)
    assert not later.value.first


async def test_a_failed_generation_is_raised_in_every_attempt_that_asked(context, generator):
    generator.error = GenerationError("no server")
    clients = [RolloutClient(context, attempt) for attempt in range(3)]
    results = await asyncio.gather(*(client.ask(ask("hi")) for client in clients), return_exceptions=True)
    assert all(isinstance(result, GenerationError) for result in results)


async def test_a_request_nobody_waits_for_any_more_is_broken_off(context, generator):
    generator.gate = asyncio.Event()
    tasks = [asyncio.create_task(RolloutClient(context, attempt).ask(ask("hi"))) for attempt in range(2)]
    async with asyncio.timeout(10):
        while not generator.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert generator.cancelled == 0
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        while not generator.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_attempts_random_generator_is_its_own_and_repeats(context):
    draws = [RolloutClient(context, attempt).rng.random() for attempt in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


async def test_a_stop_string_is_cut_off_the_text_and_kept_in_the_tokens(context, generator):
    async def generate(request: GenerateRequest, route: Route) -> list[Sampled]:
        ids = [ord(character) for character in "yes!"]
        return [Sampled(make_completion(ids, finish="stop"), "s0", "b0")]

    generator.generate = generate
    client = RolloutClient(context, 0)
    answer = await client.ask(ask("hi"))
    assert answer.text == "yes"
    assert CharCodec().decode(answer.token_ids, special=True) == "yes!"
    assert len(client.recorder.histories[0].ids) == len("<user>hi§<assistant>yes!")


async def test_a_string_is_sent_as_it_is(context):
    client = RolloutClient(context, 0)
    answer = await client.ask("raw prompt")
    assert client.recorder.prompt_text == "raw prompt"
    assert (answer.finish == "stop") == (answer.token_ids[-1] == EOS)
