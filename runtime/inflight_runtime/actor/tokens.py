"""Token book-keeping of one attempt: what was sampled, what was put in, under which version. Pure.

A :class:`History` is one sequence that only grows. A later turn continues it when its text (or its ids) starts with
what is held; only the rest is tokenised then. Otherwise the template has rewritten the past, and the turn opens a
history of its own. Sampled text is never tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from inflight_runtime.actor.tokenizer import TextCodec
from inflight_runtime.protocol import Completion
from inflight_runtime.types import Segment, Span

PEOPLE_CHARACTERS: Final = 2000
"""Longest text kept for people, of a prompt and of an answer."""


def sampling_seed(run_seed: int, group_id: int, attempt: int, turn: int, retry: int = 0) -> int:
    """Seed of one generation: the first 63 bits of SHA-256 over the five numbers, comma-separated.

    A pure function, so that a run can be replayed by a plain loop: ``turn`` counts the attempt's generations from 0,
    ``retry`` the times the attempt was started again after a failure.
    """
    text = f"{run_seed},{group_id},{attempt},{turn},{retry}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(slots=True, eq=False)
class History:
    """One append-only sequence: prompt, answer, what the environment put in, answer, ...

    Attributes:
        ids: the whole sequence; ``mask``, ``logprobs``: aligned with it; ``spans``: over its positions.
        text: what the next turn's text must start with to continue this history; ``None`` for one that was asked for
            by ids, which is continued by ids only.
        undecoded: where the newest sampled tokens start whose text is not in ``text`` yet (decoded only when a further
            turn comes).
        busy: a generation from it is under way.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str | None = None
    undecoded: int | None = None
    busy: bool = False

    def append_given(self, ids: Sequence[int]) -> None:
        """Add tokens that the environment or the template put in."""
        self.ids.extend(ids)
        self.mask.extend([False] * len(ids))
        self.logprobs.extend([0.0] * len(ids))

    def append_sampled(self, completion: Completion, server_id: str, boot_id: str) -> None:
        """Add what a server sampled."""
        offset = len(self.ids)
        self.ids.extend(completion.ids)
        self.mask.extend([True] * len(completion.ids))
        self.logprobs.extend(completion.logprobs)
        self.spans.extend(
            Span(span.epoch, span.step, offset + span.start, offset + span.end, server_id, boot_id)
            for span in completion.spans
        )


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A generation about to happen: ``history`` will grow by ``given`` and then by what is sampled."""

    history: History
    given: list[int]
    given_text: str | None
    is_new: bool

    @property
    def prompt_ids(self) -> list[int]:
        """What the server is sent."""
        return self.history.ids + self.given


class Recorder:
    """Everything that one attempt has said and heard."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.histories: list[History] = []
        self.transcript: list[tuple[bool, str]] = []
        """``(sampled, text)`` pieces for people, without the first prompt."""
        self.prompt_text = ""
        self.finish: str = ""

    def open_text(self, rendered: str, encoded: Sequence[int] | None = None) -> Turn:
        """Begin a turn from rendered text; ``encoded``: its ids when they are known already."""
        for history in reversed(self.histories):
            held = None if history.busy else self._held_text(history)
            if held is None or not rendered.startswith(held):
                continue
            rest = rendered[len(held) :]
            given = self._codec.encode(rest)
            # Some tokenizers add a space at the start of whatever they encode: that is not what the template wrote.
            if self._codec.decode(given, special=True) == rest:
                return self._begin(Turn(history, given, rest, False))
        ids = list(encoded) if encoded is not None else self._codec.encode(rendered)
        return self._begin(Turn(History(), ids, rendered, True))

    def open_ids(self, prompt_ids: Sequence[int]) -> Turn:
        """Begin a turn from token ids."""
        ids = list(prompt_ids)
        for history in reversed(self.histories):
            held = len(history.ids)
            if not history.busy and len(ids) >= held and ids[:held] == history.ids:
                return self._begin(Turn(history, ids[held:], None, False))
        return self._begin(Turn(History(), ids, None, True))

    def _begin(self, turn: Turn) -> Turn:
        turn.history.busy = True
        return turn

    def cancel(self, turn: Turn) -> None:
        """Forget a turn whose generation failed: nothing was appended."""
        turn.history.busy = False

    def complete(self, turn: Turn, completion: Completion, server_id: str, boot_id: str) -> str:
        """Append a turn's tokens and return the answer's text without special tokens."""
        history = turn.history
        history.busy = False
        self.finish = completion.finish
        answer = self._codec.decode(completion.ids, special=False)
        given_text = turn.given_text if turn.given_text is not None else self._codec.decode(turn.given, special=True)
        if not self.histories:
            self.prompt_text = given_text
        elif given_text:
            self.transcript.append((False, given_text))
        self.transcript.append((True, answer))
        if not completion.ids:
            return answer
        if turn.is_new:
            self.histories.append(history)
            history.text = turn.given_text
        elif history.text is not None:
            history.text = None if turn.given_text is None else history.text + turn.given_text
        history.append_given(turn.given)
        history.undecoded = len(history.ids)
        history.append_sampled(completion, server_id, boot_id)
        return answer

    def _held_text(self, history: History) -> str | None:
        """Text of all the history holds; sampled ids are decoded in their place, special tokens included."""
        if history.text is not None and history.undecoded is not None:
            before = self._codec.decode(history.ids[: history.undecoded], special=True)
            after = self._codec.decode(history.ids, special=True)
            if after.startswith(before):
                history.text += after[len(before) :]
            else:
                history.text += self._codec.decode(history.ids[history.undecoded :], special=True)
            history.undecoded = None
        return history.text

    def text(self) -> str:
        """The attempt for people: what the model said, and in brackets what it was told in between."""
        pieces = [text if sampled else f"\n[{text.strip()}]\n" for sampled, text in self.transcript]
        return shorten("".join(pieces))


def shorten(text: str, limit: int = PEOPLE_CHARACTERS) -> str:
    """Cut the middle out of a text that is too long for people."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def build_segments(histories: Sequence[History], prompt_ids: Sequence[int]) -> tuple[Segment, ...]:
    """Turn an attempt's histories into segments.

    One that starts with the group's ``prompt_ids``, none of them sampled, shares the prompt; any other keeps its own.
    """
    prompt = list(prompt_ids)
    size = len(prompt)
    segments = []
    for history in histories:
        shares = size > 0 and history.ids[:size] == prompt and not any(history.mask[:size])
        cut = size if shares else 0
        # What was put in after the last sampled token has no effect on any of them.
        end = max(index for index, sampled in enumerate(history.mask) if sampled) + 1
        segments.append(
            Segment(
                np.asarray(history.ids[cut:end], dtype=np.int32),
                np.asarray(history.mask[cut:end], dtype=np.bool_),
                np.asarray(history.logprobs[cut:end], dtype=np.float32),
                tuple(span._replace(start=span.start - cut, end=span.end - cut) for span in history.spans),
                shares,
            )
        )
    return tuple(segments)
