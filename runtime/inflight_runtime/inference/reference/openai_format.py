"""OpenAI's completions and chat format: what is understood of a request, and how an answer is written.

A field that would change what is sampled and is not understood is refused, never ignored.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inflight_runtime.inference.reference.engine import Answer, Finish
from inflight_runtime.inference.reference.stops import cut_at_stop

LEGACY_MAX_TOKENS = 16
"""What OpenAI's completions route generates when a request names no bound."""


@dataclass(frozen=True, slots=True)
class Style:
    """Names in which the two routes differ."""

    kind: str
    chunk_kind: str
    prefix: str
    chat: bool
    default_max_tokens: int | None


TEXT = Style("text_completion", "text_completion", "cmpl", False, LEGACY_MAX_TOKENS)
CHAT = Style("chat.completion", "chat.completion.chunk", "chatcmpl", True, None)


class OpenAIRequest(BaseModel):
    """Fields that both routes share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: Literal[1] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    user: str | None = None

    def limit(self, style: Style) -> int | None:
        """Bound of an answer; ``None``: as long as fits."""
        return style.default_max_tokens if self.max_tokens is None else self.max_tokens

    def stop_texts(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def wants_logprobs(self) -> bool:
        """Whether the answer shall carry the sampled tokens' logprobs."""
        return False


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``."""

    prompt: str | list[int]
    logprobs: Literal[0, 1] | None = None
    echo: Literal[False] = False

    def wants_logprobs(self) -> bool:
        """See the base."""
        return self.logprobs is not None


class ChatMessage(BaseModel):
    """One message, as the chat template sees it."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str
    name: str | None = None


class ChatRequest(OpenAIRequest):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: Literal[0] | None = None

    def limit(self, style: Style) -> int | None:
        """The newer name wins."""
        return super().limit(style) if self.max_completion_tokens is None else self.max_completion_tokens

    def wants_logprobs(self) -> bool:
        """See the base."""
        return self.logprobs


class Reply:
    """Writes the answers of one request."""

    def __init__(self, style: Style, model: str, tokenizer: Any, prompt_tokens: int, created: int) -> None:
        self._style = style
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": created, "model": model}
        self._started: set[int] = set()

    def whole(self, answers: list[Answer], stop: list[str], *, with_logprobs: bool) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        answered = sum(len(answer.ids) for answer in answers)
        return {
            **self._head,
            "object": self._style.kind,
            "choices": [self._choice(index, answer, stop, with_logprobs) for index, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": answered,
                "total_tokens": self._prompt_tokens + answered,
            },
        }

    def piece(self, index: int, text: str, finish: Finish | None = None) -> dict[str, Any]:
        """One event of a stream."""
        content: dict[str, Any] = {"text": text}
        if self._style.chat:
            role = {} if index in self._started else {"role": "assistant"}
            content = {"delta": {**role, "content": text}}
            self._started.add(index)
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": self._style.chunk_kind, "choices": [choice]}

    def _choice(self, index: int, answer: Answer, stop: list[str], with_logprobs: bool) -> dict[str, Any]:
        text = cut_at_stop(self._tokenizer.decode(answer.ids, skip_special_tokens=True), stop)
        content = {"message": {"role": "assistant", "content": text}} if self._style.chat else {"text": text}
        logprobs = self._logprobs(answer) if with_logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": answer.finish}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        tokens = [self._tokenizer.decode([token]) for token in answer.ids]
        if self._style.chat:
            return {
                "content": [
                    {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, logprob in zip(tokens, answer.logprobs, strict=True)
                ]
            }
        offsets = [sum(len(token) for token in tokens[:index]) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": answer.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def models(name: str, max_length: int) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "inflight", "max_model_len": max_length}
    return {"object": "list", "data": [entry]}
