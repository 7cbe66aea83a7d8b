"""The data model refuses what breaks it, and its wire form loses nothing."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.types import (
    Attempt,
    Group,
    InvalidSampleError,
    Segment,
    Span,
    Version,
    decode_group,
    encode_group,
    make_segment,
)
from support.groups import groups


def segment(**changes: object) -> Segment:
    valid = make_segment(
        [5, 6, 7, 8],
        [True, True, False, True],
        [-0.5, -0.25, 0.0, -1.0],
        [Span(1, 2, 0, 1, "s", "b"), Span(1, 3, 1, 2, "s", "b"), Span(1, 3, 3, 4, "s", "b")],
    )
    return replace(valid, **changes)


def group_of(*parts: Segment) -> Group:
    return Group(3, 1, 9, np.asarray([1, 2], dtype=np.int32), (Attempt(segments=parts, reward=1.0),))


def test_versions_order_by_epoch_before_step() -> None:
    assert Version(1, 7) < Version(2, 5) < Version(2, 6)


@given(st.integers(0, 10**6), st.integers(0, 10**9))
def test_version_text_round_trips(epoch: int, step: int) -> None:
    assert Version.parse(str(Version(epoch, step))) == (epoch, step)


@pytest.mark.parametrize("text", ["", "1", "1.", "-1.2", "1.2.3", "a.b", " 1.2", "1.2\n"])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a weight version"):
        Version.parse(text)


def test_a_valid_segment_passes() -> None:
    segment().validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "must match"),
        ({"logprobs": np.asarray([-0.5, np.nan, 0, -1], np.float32)}, "not finite"),
        ({"logprobs": np.asarray([-0.5, -0.5, -0.1, -1], np.float32)}, "not sampled carries a logprob"),
        ({"logprobs": np.asarray([0.5, -0.5, 0, -1], np.float32)}, "above zero"),
        ({"ids": np.asarray([5, -6, 7, 8], np.int32)}, "negative token id"),
        ({"spans": (Span(1, 2, 0, 2, "s", "b"),)}, "do not tile"),
        ({"spans": (Span(1, 2, 0, 4, "s", "b"),)}, "do not tile"),
        ({"spans": (Span(1, 2, 0, 2, "s", "b"), Span(1, 2, 1, 2, "s", "b"))}, "overlaps"),
        ({"spans": (Span(1, 2, 3, 4, "s", "b"), Span(1, 2, 0, 2, "s", "b"))}, "overlaps"),
        ({"spans": (Span(1, -2, 0, 2, "s", "b"), Span(1, 2, 3, 4, "s", "b"))}, "has version"),
        ({"shares_prompt": False}, "history of its own"),
    ],
)
def test_a_segment_that_breaks_a_rule_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSampleError, match=words):
        segment(**changes).validate()


def test_a_segment_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(InvalidSampleError, match="no sampled token"):
        make_segment([1], [False], [0.0], []).validate()


def test_a_failed_attempt_must_not_carry_tokens() -> None:
    bad = replace(group_of(segment()).attempts[0], status="failed")
    with pytest.raises(InvalidSampleError, match="status 'failed' with 1 segments"):
        replace(group_of(), attempts=(bad,)).validate()


def test_a_reward_must_be_finite() -> None:
    bad = replace(group_of(segment()).attempts[0], reward=float("nan"))
    with pytest.raises(InvalidSampleError, match="reward nan"):
        replace(group_of(), attempts=(bad,)).validate()


def test_the_oldest_version_looks_at_every_attempt() -> None:
    assert group_of(segment(), segment()).oldest_version() == Version(1, 2)
    failed = replace(group_of(), attempts=(Attempt(status="failed", error="x"),))
    assert failed.oldest_version() is None


@given(groups())
def test_the_wire_form_loses_nothing(group: Group) -> None:
    group.validate()
    data = encode_group(group)
    again = decode_group(data)
    assert encode_group(again) == data
    assert again.oldest_version() == group.oldest_version()
    assert [attempt.reward for attempt in again.attempts] == [attempt.reward for attempt in group.attempts]
    assert [attempt.sampled_tokens for attempt in again.attempts] == [a.sampled_tokens for a in group.attempts]


@given(groups(), st.data())
def test_a_damaged_payload_is_refused_or_still_valid_but_never_crashes(group: Group, data: st.DataObject) -> None:
    raw = bytearray(encode_group(group))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidSampleError):
        decode_group(bytes(raw)).validate()


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x93\x01\x02\x03", b"not msgpack at all", b"\xc1"])
def test_bytes_that_are_no_group_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidSampleError):
        decode_group(data)
