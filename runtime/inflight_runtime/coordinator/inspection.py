"""Checks a submitted group and boils it down to what the ledger needs, without building it.

Building a group (:func:`inflight_runtime.types.decode_group`) makes three arrays per segment and checks each, which
would cost the coordinator most of its time. Here all segments are checked at once. The quick check may only be too
strict: what it does not pass is decoded in full, and that has the last word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgpack
import numpy as np

from inflight_runtime.types import WIRE_FORMAT, AttemptStatus, FinishReason, InvalidSampleError, decode_group

FINISHES: Final = get_args(FinishReason)
STATUSES: Final = get_args(AttemptStatus)
LIMIT: Final = 2**62
"""Numbers from here on do not fit the ledger."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What the ledger needs of a valid group; ``payload`` is kept as it came."""

    group_id: int
    fence: int
    problem_index: int
    attempts: int
    rewards: tuple[float, ...]
    """Of the surviving attempts."""
    parts: tuple[dict[str, float], ...]
    oldest_step: int
    """Smallest step among the versions of the surviving attempts' tokens; 0 without survivors."""
    payload: bytes

    @property
    def failed(self) -> int:
        """Number of attempts that failed."""
        return self.attempts - len(self.rewards)


class _DoubtError(Exception):
    """The quick check cannot tell."""


def inspect(payload: bytes) -> Submission:
    """Check a msgpack group.

    Raises:
        InvalidSampleError: it cannot be read or breaks the data model.
    """
    try:
        return _quick(payload)
    except (_DoubtError, ValueError, KeyError, TypeError, AttributeError, IndexError, msgpack.UnpackException):
        return _thorough(payload)


def _thorough(payload: bytes) -> Submission:
    group = decode_group(payload)
    survivors = group.survivors
    oldest_step = min((span.step for attempt in survivors for span in attempt.spans()), default=0)
    if not all(0 <= number < LIMIT for number in (group.group_id, group.fence, group.problem_index, oldest_step)):
        raise InvalidSampleError(f"group {group.group_id}: an id, fence or step is out of range")
    return Submission(
        group_id=group.group_id,
        fence=group.fence,
        problem_index=group.problem_index,
        attempts=len(group.attempts),
        rewards=tuple(attempt.reward for attempt in survivors),
        parts=tuple(attempt.parts for attempt in survivors),
        oldest_step=oldest_step,
        payload=payload,
    )


def _quick(payload: bytes) -> Submission:
    raw = msgpack.unpackb(payload, raw=False)
    numbers = (raw["group_id"], raw["fence"], raw["problem_index"])
    _sure(type(raw["format"]) is int and raw["format"] == WIRE_FORMAT)
    _sure(all(type(number) is int and 0 <= number < LIMIT for number in numbers))
    _sure(type(raw["prompt_ids"]) is bytes and len(raw["prompt_ids"]) % 4 == 0 and type(raw["prompt_text"]) is str)
    _sure(type(raw["attempts"]) is list and bool(raw["attempts"]))
    tokens = _Tokens(has_prompt=bool(raw["prompt_ids"]))
    rewards: list[float] = []
    parts: list[dict[str, float]] = []
    for attempt in raw["attempts"]:
        reward, status = attempt["reward"], attempt["status"]
        if not (
            type(reward) is float
            and math.isfinite(reward)
            and type(attempt["text"]) is type(attempt["error"]) is str
            and attempt["finish"] in FINISHES
            and status in STATUSES
            and type(attempt["parts"]) is dict
            and all(type(name) is str and type(value) is float for name, value in attempt["parts"].items())
            and type(attempt["segments"]) is list
            and (status == "ok") is bool(attempt["segments"])
        ):
            raise _DoubtError
        for segment in attempt["segments"]:
            tokens.add(segment)
        if status == "ok":
            rewards.append(reward)
            parts.append(attempt["parts"])
    tokens.check()
    _sure((tokens.oldest_step or 0) < LIMIT)
    return Submission(*numbers, len(raw["attempts"]), tuple(rewards), tuple(parts), tokens.oldest_step or 0, payload)


class _Tokens:
    """The tokens of all segments, laid end to end, for checks over all of them at once."""

    def __init__(self, *, has_prompt: bool) -> None:
        self._has_prompt = has_prompt
        self._ids: list[bytes] = []
        self._masks: list[bytes] = []
        self._logprobs: list[bytes] = []
        self.oldest_step: int | None = None

    def add(self, segment: dict[str, Any]) -> None:
        """Take a segment and check that its spans tile its mask."""
        ids, mask, logprobs = segment["ids"], segment["mask"], segment["logprobs"]
        spans, shares = segment["spans"], segment["shares_prompt"]
        count = len(mask)
        if not (
            type(ids) is type(mask) is type(logprobs) is bytes
            and count > 0
            and len(ids) == len(logprobs) == 4 * count
            and type(shares) is bool
            and type(spans) is list
            and (self._has_prompt if shares else not mask[0])
        ):
            raise _DoubtError
        tiled = bytearray(count)
        position = 0
        for epoch, step, start, end, server, boot_id in spans:
            if not (
                type(epoch) is type(step) is type(start) is type(end) is int
                and type(server) is type(boot_id) is str
                and position <= start < end <= count
                and epoch >= 0
                and step >= 0
            ):
                raise _DoubtError
            tiled[start:end] = b"\x01" * (end - start)
            position = end
            if self.oldest_step is None or step < self.oldest_step:
                self.oldest_step = step
        if not position or tiled != mask:
            raise _DoubtError
        self._ids.append(ids)
        self._masks.append(mask)
        self._logprobs.append(logprobs)

    def check(self) -> None:
        """Check the ids and logprobs of everything taken."""
        if not self._masks:
            return
        ids = np.frombuffer(b"".join(self._ids), dtype="<i4")
        mask = np.frombuffer(b"".join(self._masks), dtype=np.uint8)
        logprobs = np.frombuffer(b"".join(self._logprobs), dtype="<f4")
        _sure(int(ids.min()) >= 0)
        # NaN makes the maximum NaN, and no comparison with it holds.
        _sure(bool(logprobs.max() <= 1e-3) and math.isfinite(float(logprobs.min())))
        _sure(not np.logical_and(mask == 0, logprobs).any())


def _sure(holds: bool) -> None:
    if not holds:
        raise _DoubtError
