"""What an environment talks to: a client with the shape of OpenAI's, over token ids.

The template is rendered here and the servers are sent ids, so template drift between machines cannot matter, and every
sampled token comes back with its logprob and the version it was sampled under.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeVar, cast

from inflight_runtime.actor.blocking import BlockingBatcher, BlockingTimeoutError
from inflight_runtime.actor.coalesce import Coalescer, Parameters
from inflight_runtime.actor.environments import Answer, Messages, PromptTooLongError
from inflight_runtime.actor.tokenizer import TextCodec
from inflight_runtime.actor.tokens import Recorder, Turn, sampling_seed
from inflight_runtime.config.roles import Sampling

T = TypeVar("T")

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "n": (None, 1),
    "stream": (None, False),
    "seed": (None,),
    "logprobs": (None, False, True),
}
"""Parameters of the OpenAI API that are accepted only at the value that changes nothing."""
CACHED_PROMPTS: Final = 64


class SamplingRefusedError(ValueError):
    """The environment asked for sampling that would make what is trained on wrong; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """``choices[0].message``."""

    content: str
    role: Literal["assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class Choice:
    """``choices[0]``."""

    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    token_ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """What ``chat.completions.create`` returns, with the fields of OpenAI's that make sense here."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


@dataclass(slots=True, eq=False)
class GroupContext:
    """What the attempts of one group share.

    Attributes:
        group_id: of the lease; with ``sampling.seed`` it determines every seed.
        evaluating: the problem is held out: scored, never trained on.
        opening: what every attempt asks first, when the environment knows that beforehand.
    """

    group_id: int
    codec: TextCodec
    coalescer: Coalescer
    blocking: BlockingBatcher
    sampling: Sampling
    max_length: int
    model_name: str
    reward_timeout_s: float
    evaluating: bool = False
    opening: Messages | str | None = None
    _rendered: dict[str, str] = field(default_factory=dict)
    _rendered_opening: str | None = None
    _encoded: dict[str, list[int]] = field(default_factory=dict)

    def render(self, messages: Messages, options: Mapping[str, Any]) -> str:
        """Render messages; the attempts' common first prompt is rendered once."""
        if messages is self.opening and not options:
            if self._rendered_opening is None:
                self._rendered_opening = self.codec.render([_plain_message(message) for message in messages], {})
            return self._rendered_opening
        plain = [_plain_message(message) for message in messages]
        try:
            key = json.dumps([plain, options])
        except (TypeError, ValueError):
            return self.codec.render(plain, options)
        rendered = self._rendered.get(key)
        if rendered is None:
            rendered = self.codec.render(plain, options)
            if len(self._rendered) < CACHED_PROMPTS:
                self._rendered[key] = rendered
        return rendered

    def encode(self, text: str) -> list[int]:
        """Tokenise a whole prompt; the attempts' common first prompt is tokenised once."""
        ids = self._encoded.get(text)
        if ids is None:
            ids = self.codec.encode(text)
            if len(self._encoded) < CACHED_PROMPTS:
                self._encoded[text] = ids
        return ids


class RolloutClient:
    """One attempt's way to the model.

    Attributes:
        chat: ``await client.chat.completions.create(messages=...)``, as with OpenAI's async client.
        attempt: number of this attempt in its group, from 0.
        evaluating: the problem is held out.
    """

    def __init__(self, context: GroupContext, attempt: int, retry: int = 0) -> None:
        self._context = context
        self._retry = retry
        self._turns = 0
        self.attempt = attempt
        self.evaluating = context.evaluating
        self.recorder = Recorder(context.codec)
        self.chat = Chat(self)

    @cached_property
    def rng(self) -> random.Random:
        """A random generator of this attempt's own; the same in a replay."""
        context = self._context
        return random.Random(  # noqa: S311
            sampling_seed(context.sampling.seed, context.group_id, self.attempt, -1, self._retry)
        )

    @property
    def opening(self) -> Messages | str | None:
        """What the environment's ``opening`` gave for this problem."""
        return self._context.opening

    @property
    def model_name(self) -> str:
        """Name of the model that is trained."""
        return self._context.model_name

    async def ask(
        self, messages: Messages | str, *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None
    ) -> Answer:
        """Ask the model: chat messages, or a string that is sent without the chat template.

        Raises:
            PromptTooLongError: no room is left for an answer.
            SamplingRefusedError: ``max_tokens`` is over the job's ``sampling.maxTokens``.
            GenerationError: the inference servers gave no answer.
        """
        rendered = messages if isinstance(messages, str) else self._context.render(messages, {})
        return (await self._ask_text(rendered, max_tokens, stop))[0]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Answer:
        """Ask the model with token ids. Ids that continue an earlier sequence of this attempt extend it."""
        return (await self._turn(self.recorder.open_ids(prompt_ids), max_tokens, stop))[0]

    async def run_blocking(self, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """Call blocking code in a thread.

        Args:
            function: what to call.
            args: with which arguments.
            timeout_s: deadline in seconds; by default the job's ``environment.rewardTimeoutSeconds``.

        Raises:
            BlockingTimeoutError: it did not return in time.
        """
        timeout = self._context.reward_timeout_s if timeout_s is None else timeout_s
        return cast(T, await self._context.blocking.run(function, args, timeout))

    async def within_deadline(self, awaitable: Awaitable[T]) -> T:
        """Await something within the job's ``environment.rewardTimeoutSeconds``.

        Raises:
            BlockingTimeoutError: it took longer.
        """
        limit = self._context.reward_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await awaitable
        except TimeoutError as error:
            raise BlockingTimeoutError(f"the reward did not come within {limit:g} s") from error

    async def complete_chat(self, messages: Messages, parameters: Mapping[str, Any]) -> ChatCompletion:
        """Behind ``chat.completions.create``."""
        wanted = dict(parameters)
        max_tokens = wanted.pop("max_tokens", None)
        if max_tokens is None:
            max_tokens = wanted.pop("max_completion_tokens", None)
        stop = wanted.pop("stop", None)
        options = dict(wanted.pop("chat_template_kwargs", None) or {})
        if wanted.get("tools"):
            options["tools"] = wanted["tools"]
        for ignored in ("model", "tools", "user"):
            wanted.pop(ignored, None)
        self._check_sampling(wanted)
        rendered = self._context.render(messages, options)
        answer, prompt_tokens = await self._ask_text(rendered, max_tokens, stop)
        return ChatCompletion(
            id=f"{self._context.group_id}-{self.attempt}-{self._turns}",
            model=self.model_name,
            choices=[Choice(ChatMessage(answer.text), answer.finish, answer.token_ids)],
            usage=Usage(prompt_tokens, len(answer.token_ids)),
        )

    def _check_sampling(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            if name == "temperature":
                if value is not None and value != self._context.sampling.temperature:
                    raise SamplingRefusedError(
                        f"temperature={value} differs from the job's {self._context.sampling.temperature}: all "
                        "rollouts of a run are sampled and trained at one; set spec.sampling.temperature"
                    )
            elif name not in NEUTRAL:
                raise SamplingRefusedError(
                    f"chat.completions.create does not know {name!r}; it takes messages, max_tokens, stop, tools and "
                    "chat_template_kwargs"
                )
            elif value not in NEUTRAL[name]:
                raise SamplingRefusedError(
                    f"{name}={value!r} is refused: rollouts are sampled by temperature alone, one answer a call, with "
                    "seeds from the run's seed; anything else biases the importance ratio. Leave it out"
                )

    async def _ask_text(
        self, rendered: str, max_tokens: int | None, stop: str | Sequence[str] | None
    ) -> tuple[Answer, int]:
        recorder = self.recorder
        encoded = None if recorder.histories else self._context.encode(rendered)
        return await self._turn(recorder.open_text(rendered, encoded), max_tokens, stop)

    async def _turn(self, turn: Turn, max_tokens: int | None, stop: str | Sequence[str] | None) -> tuple[Answer, int]:
        context = self._context
        prompt_ids = turn.prompt_ids
        try:
            parameters = self._parameters(len(prompt_ids), max_tokens, stop)
            seed = sampling_seed(context.sampling.seed, context.group_id, self.attempt, self._turns, self._retry)
            self._turns += 1
            sampled = await context.coalescer.generate(prompt_ids, parameters, self.attempt, seed)
        except BaseException:
            self.recorder.cancel(turn)
            raise
        text = self.recorder.complete(turn, sampled.completion, sampled.server_id, sampled.boot_id)
        finish: Literal["stop", "length"] = "length" if sampled.completion.finish == "length" else "stop"
        if finish == "stop" and parameters.stop:
            # As OpenAI does: the text ends before the stop string; the tokens of it were sampled and stay.
            text = text[: min((at for stop in parameters.stop if (at := text.find(stop)) >= 0), default=len(text))]
        return Answer(text, finish, tuple(sampled.completion.ids)), len(prompt_ids)

    def _parameters(self, prompt_tokens: int, max_tokens: int | None, stop: str | Sequence[str] | None) -> Parameters:
        sampling = self._context.sampling
        room = self._context.max_length - prompt_tokens
        if prompt_tokens == 0:
            raise SamplingRefusedError("the prompt is empty: the model needs at least one token to answer to")
        if room < 1:
            raise PromptTooLongError(prompt_tokens, self._context.max_length, first=self._turns == 0)
        if max_tokens is not None and not 1 <= max_tokens <= sampling.max_tokens:
            raise SamplingRefusedError(
                f"max_tokens={max_tokens}: must be from 1 to the job's sampling.maxTokens ({sampling.max_tokens})"
            )
        stops = sampling.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        return Parameters(min(max_tokens or sampling.max_tokens, room), sampling.temperature, stops)


class Chat:
    """``client.chat``."""

    def __init__(self, client: RolloutClient) -> None:
        self.completions = ChatCompletions(client)


class ChatCompletions:
    """``client.chat.completions``."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    async def create(self, *, messages: Messages, **parameters: Any) -> ChatCompletion:
        """Ask for one chat completion, as with OpenAI's async client.

        Takes ``max_tokens`` (or ``max_completion_tokens``), ``stop``, ``tools`` and ``chat_template_kwargs`` (both go
        to the template); ``model`` is ignored. A conversation that continues an earlier one of this attempt extends
        its token sequence.

        Raises:
            SamplingRefusedError: a parameter that would bias training, or one that is not known.
            PromptTooLongError: no room is left for an answer.
            GenerationError: the inference servers gave no answer.
        """
        return await self._client.complete_chat(messages, parameters)


def _plain_message(message: Any) -> dict[str, Any]:
    """A message as the template reads it; ``choices[0].message`` may be put back into the list as it is."""
    if isinstance(message, Mapping):
        return dict(message)
    role, content = getattr(message, "role", None), getattr(message, "content", None)
    if role is None or content is None:
        raise TypeError(f"a chat message is a dict with 'role' and 'content', got {type(message).__name__}")
    return {"role": role, "content": content}
