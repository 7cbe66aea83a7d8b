"""The data model every role shares: versions, rollouts and their provenance.

``Group{prompt_ids once, attempts} -> Attempt{reward, segments} -> Segment{ids, mask, logprobs, spans}``.

Tokens in, tokens out: sampled text is never tokenised again, so what a server sampled is exactly what is trained on.
Every sampled token carries the logprob under the version that sampled it, and a span that names that version and the
server (with its boot id) it came from.

Imports neither torch nor an engine: the coordinator and the actor stay light.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from inflight_runtime.refusals import problems

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "error"]
AttemptStatus = Literal["ok", "failed"]
WIRE_FORMAT: Final = 1
"""Version of the msgpack layout; a payload of another layout is refused, never guessed at."""


class InvalidSampleError(ValueError):
    """A rollout breaks the data model; the message names the part and the rule."""


class Version(NamedTuple):
    """A weight version: ``step`` optimizer steps completed in ``epoch``.

    The coordinator raises ``epoch`` at each trainer start, so that step 7 before a crash and step 7 after a rollback
    are never confused. Versions order first by epoch, then by step.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read ``"epoch.step"``.

        Raises:
            ValueError: ``text`` is not two non-negative decimal numbers joined by a dot.
        """
        match = re.fullmatch(r"(\d+)\.(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a weight version: expected 'epoch.step', for instance '1.42'")
        return cls(int(match[1]), int(match[2]))


class Span(NamedTuple):
    """Tokens ``[start, end)`` of a segment's ``ids``, all sampled under one version by one server process."""

    epoch: int
    step: int
    start: int
    end: int
    server: str
    boot_id: str

    @property
    def version(self) -> Version:
        """The weight version that sampled these tokens."""
        return Version(self.epoch, self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that grew by appending only; a template that rewrites history opens a new segment.

    Attributes:
        ids: ``int32[T]`` token ids after the prompt (``shares_prompt``) or the whole sequence (otherwise).
        mask: ``bool[T]`` true on sampled tokens, false on what the environment or the template put in.
        logprobs: ``float32[T]`` log-probability of each sampled token under the version that sampled it, natural log,
            of the temperature-scaled distribution; 0 where ``mask`` is false.
        spans: tile exactly the sampled tokens, in order.
        shares_prompt: the sequence is ``group.prompt_ids + ids``; false when the segment has a history of its own.
    """

    ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    shares_prompt: bool = True

    def validate(self, where: str = "segment") -> None:
        """Check the rules of the data model.

        Raises:
            InvalidSampleError: with ``where`` and the broken rule.
        """
        count = len(self.ids)
        if not (len(self.mask) == len(self.logprobs) == count):
            raise InvalidSampleError(
                f"{where}: {count} ids, {len(self.mask)} mask entries, {len(self.logprobs)} logprobs; they must match"
            )
        if count == 0:
            raise InvalidSampleError(f"{where}: has no tokens")
        if int(self.ids.min()) < 0:
            raise InvalidSampleError(f"{where}: negative token id")
        if not np.isfinite(self.logprobs).all():
            raise InvalidSampleError(f"{where}: a logprob is not finite")
        if (self.logprobs[~self.mask] != 0).any():
            raise InvalidSampleError(f"{where}: a token that was not sampled carries a logprob")
        if (self.logprobs > 1e-3).any():
            raise InvalidSampleError(f"{where}: a logprob is above zero")
        if not self.mask.any():
            raise InvalidSampleError(f"{where}: has no sampled token")
        if not self.shares_prompt and self.mask[0]:
            raise InvalidSampleError(f"{where}: has a history of its own and yet starts with a sampled token")
        covered = np.zeros(count, dtype=np.bool_)
        position = 0
        for span in self.spans:
            if not (position <= span.start < span.end <= count):
                raise InvalidSampleError(f"{where}: span {span.start}:{span.end} overlaps, is empty or out of order")
            if span.epoch < 0 or span.step < 0:
                raise InvalidSampleError(f"{where}: span {span.start}:{span.end} has version {span.version}")
            covered[span.start : span.end] = True
            position = span.end
        if not np.array_equal(covered, self.mask):
            raise InvalidSampleError(f"{where}: the version spans do not tile exactly the sampled tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One rollout of a group's prompt.

    Attributes:
        status: ``failed`` attempts are counted and left out of the baseline; they have no segments.
        reward: the scalar the advantage is computed from.
        parts: named parts of the reward and other numbers the environment reports, for the logs.
        finish: why the last generation ended; ``length`` when the token budget ran out.
        text: what the model said, for people (may be shortened); never tokenised.
        error: why the attempt failed.
    """

    segments: tuple[Segment, ...] = ()
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    status: AttemptStatus = "ok"
    finish: FinishReason = "stop"
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the attempt may be trained on."""
        return self.status == "ok"

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled in this attempt."""
        return sum(int(segment.mask.sum()) for segment in self.segments)

    def spans(self) -> Iterator[Span]:
        """All version spans of the attempt, segment by segment."""
        for segment in self.segments:
            yield from segment.spans


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All attempts at one problem: the unit that is leased, submitted and trained.

    Attributes:
        group_id: given by the coordinator with the lease; also the canonical order inside a batch.
        fence: the lease's fence number; a result under an older fence is refused.
        problem_index: which problem of the environment this is.
        prompt_ids: ``int32[P]`` the prompt that the attempts share, stored once.
        prompt_text: the prompt for people.
    """

    group_id: int
    fence: int
    problem_index: int
    prompt_ids: IntArray
    attempts: tuple[Attempt, ...]
    prompt_text: str = ""

    def validate(self) -> None:
        """Check this group and everything in it.

        Raises:
            InvalidSampleError: with the place and the broken rule.
        """
        if not self.attempts:
            raise InvalidSampleError(f"group {self.group_id}: has no attempts")
        for number, attempt in enumerate(self.attempts):
            where = f"group {self.group_id} attempt {number}"
            if attempt.ok != bool(attempt.segments):
                raise InvalidSampleError(f"{where}: status {attempt.status!r} with {len(attempt.segments)} segments")
            if not np.isfinite(attempt.reward):
                raise InvalidSampleError(f"{where}: reward {attempt.reward} is not finite")
            for index, segment in enumerate(attempt.segments):
                segment.validate(f"{where} segment {index}")
                if segment.shares_prompt and len(self.prompt_ids) == 0:
                    raise InvalidSampleError(f"{where} segment {index}: shares a prompt that is empty")

    @property
    def survivors(self) -> tuple[Attempt, ...]:
        """The attempts that may be trained on."""
        return tuple(attempt for attempt in self.attempts if attempt.ok)

    def oldest_version(self) -> Version | None:
        """The smallest version among the sampled tokens; ``None`` when every attempt failed."""
        return min((span.version for attempt in self.attempts for span in attempt.spans()), default=None)


def encode_group(group: Group) -> bytes:
    """Serialise a group as msgpack; arrays travel as little-endian bytes. No pickle."""
    return bytes(msgpack.packb(_group_to_wire(group), use_bin_type=True))


def decode_group(data: bytes) -> Group:
    """Read what :func:`encode_group` wrote and validate it.

    Raises:
        InvalidSampleError: not such a payload, or one that breaks the data model.
    """
    try:
        raw = msgpack.unpackb(data, raw=False)
        if not isinstance(raw, dict) or raw.get("format") != WIRE_FORMAT:
            raise InvalidSampleError(f"group payload: not of wire format {WIRE_FORMAT}")
        group = _group_from_wire(_WIRE.validate_python(raw, strict=True))
    except InvalidSampleError:
        raise
    except ValidationError as error:
        raise InvalidSampleError(f"group payload: {problems(error)[0]}") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidSampleError(f"group payload cannot be read: {error!r}") from error
    group.validate()
    return group


def make_segment(
    ids: Iterable[int],
    mask: Iterable[bool],
    logprobs: Iterable[float],
    spans: Iterable[Span],
    *,
    shares_prompt: bool = True,
) -> Segment:
    """Build a segment from plain sequences (see :class:`Segment` for the meaning of each)."""
    return Segment(
        np.asarray(list(ids), dtype=np.int32),
        np.asarray(list(mask), dtype=np.bool_),
        np.asarray(list(logprobs), dtype=np.float32),
        tuple(spans),
        shares_prompt,
    )


class _WireSegment(TypedDict):
    ids: bytes
    mask: bytes
    logprobs: bytes
    spans: list[Span]
    shares_prompt: bool


class _WireAttempt(TypedDict):
    reward: float
    parts: dict[str, float]
    status: AttemptStatus
    finish: FinishReason
    text: str
    error: str
    segments: list[_WireSegment]


class _WireGroup(TypedDict):
    format: int
    group_id: int
    fence: int
    problem_index: int
    prompt_ids: bytes
    prompt_text: str
    attempts: list[_WireAttempt]


_WIRE: Final = TypeAdapter(_WireGroup)


def _group_to_wire(group: Group) -> _WireGroup:
    return {
        "format": WIRE_FORMAT,
        "group_id": group.group_id,
        "fence": group.fence,
        "problem_index": group.problem_index,
        "prompt_ids": group.prompt_ids.astype("<i4").tobytes(),
        "prompt_text": group.prompt_text,
        "attempts": [
            {
                "reward": float(attempt.reward),
                "parts": {name: float(value) for name, value in attempt.parts.items()},
                "status": attempt.status,
                "finish": attempt.finish,
                "text": attempt.text,
                "error": attempt.error,
                "segments": [
                    {
                        "ids": segment.ids.astype("<i4").tobytes(),
                        "mask": segment.mask.astype(np.uint8).tobytes(),
                        "logprobs": segment.logprobs.astype("<f4").tobytes(),
                        "spans": list(segment.spans),
                        "shares_prompt": segment.shares_prompt,
                    }
                    for segment in attempt.segments
                ],
            }
            for attempt in group.attempts
        ],
    }


def _group_from_wire(raw: _WireGroup) -> Group:
    return Group(
        group_id=raw["group_id"],
        fence=raw["fence"],
        problem_index=raw["problem_index"],
        prompt_ids=np.frombuffer(raw["prompt_ids"], dtype="<i4").astype(np.int32),
        prompt_text=raw["prompt_text"],
        attempts=tuple(
            Attempt(
                segments=tuple(
                    Segment(
                        np.frombuffer(part["ids"], dtype="<i4").astype(np.int32),
                        np.frombuffer(part["mask"], dtype=np.uint8).astype(np.bool_),
                        np.frombuffer(part["logprobs"], dtype="<f4").astype(np.float32),
                        tuple(part["spans"]),
                        part["shares_prompt"],
                    )
                    for part in item["segments"]
                ),
                reward=item["reward"],
                parts=item["parts"],
                status=item["status"],
                finish=item["finish"],
                text=item["text"],
                error=item["error"],
            )
            for item in raw["attempts"]
        ),
    )
