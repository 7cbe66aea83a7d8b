from __future__ import annotations

import contextlib
import re
from functools import reduce
from operator import getitem
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.coordinator import inspection
from inflight_runtime.coordinator.inspection import Submission, inspect
from inflight_runtime.types import Group, InvalidSampleError, decode_group, encode_group
from support.coordinators import group_for
from support.groups import groups


def facts(submission: Submission) -> tuple[object, ...]:
    return (
        submission.group_id,
        submission.fence,
        submission.problem_index,
        submission.attempts,
        submission.rewards,
        submission.parts,
        submission.oldest_step,
    )


@given(groups())
def test_a_valid_group_passes_with_the_facts_that_decoding_gives(group: Group) -> None:
    data = encode_group(group)
    found = inspect(data)
    assert facts(found) == facts(inspection._thorough(data))
    assert found.payload is data
    assert found.failed == sum(not attempt.ok for attempt in group.attempts)


@given(groups())
def test_ordinary_groups_take_the_quick_way(group: Group) -> None:
    assert facts(inspection._quick(encode_group(group))) == facts(inspection._thorough(encode_group(group)))


def _paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*path, key))
    return found


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 40),
    st.integers(2**63, 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=16),
    st.lists(st.integers(0, 3), max_size=3),
)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A group on the wire, one part of which is something else."""
    raw = msgpack.unpackb(encode_group(draw(groups(max_attempts=2))))
    *above, last = draw(st.sampled_from(_paths(raw)))
    at = reduce(getitem, above, raw)
    if isinstance(at[last], bytes) and at[last] and draw(st.booleans()):
        changed = bytearray(at[last])
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
        at[last] = bytes(changed)
    else:
        at[last] = draw(_JUNK)
    return bytes(msgpack.packb(raw))


@given(spoilt())
def test_nothing_passes_that_decoding_refuses(payload: bytes) -> None:
    try:
        quick = inspection._quick(payload)
    except Exception:
        return
    decode_group(payload)
    assert facts(quick) == facts(inspection._thorough(payload))


@given(spoilt())
def test_a_spoilt_group_passes_or_is_refused_as_such(payload: bytes) -> None:
    with contextlib.suppress(InvalidSampleError):
        inspect(payload)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (("group_id",), "7", "group_id: Input should be a valid integer"),
        (("attempts",), {}, "attempts: Input should be a valid list"),
        (("attempts", 0, "finish"), "tired", "attempts.0.finish: Input should be 'stop', 'length' or 'error'"),
        (("attempts", 0, "parts", "exact"), "1", "attempts.0.parts.exact: Input should be a valid number"),
        (("attempts", 0, "segments", 0, "spans", 0, 0), {}, "attempts.0.segments.0.spans.0.0: Input should be a valid"),
        (("attempts", 0, "segments", 0, "spans", 0, 4), 3, "attempts.0.segments.0.spans.0.4: Input should be a valid"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: tuple[str | int, ...], value: object, words: str) -> None:
    raw: Any = msgpack.unpackb(encode_group(group_for(1)))
    *above, last = field
    reduce(getitem, above, raw)[last] = value
    with pytest.raises(InvalidSampleError, match=f"^group payload: {re.escape(words)}"):
        inspect(msgpack.packb(raw))


@pytest.mark.parametrize(
    "payload", [b"", b"\x00", b"not msgpack at all", msgpack.packb({"format": 2}), msgpack.packb([])]
)
def test_rubbish_is_refused_with_a_message(payload: bytes) -> None:
    with pytest.raises(InvalidSampleError):
        inspect(payload)


def test_numbers_that_the_ledger_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidSampleError, match="out of range"):
        inspect(encode_group(group_for(2**62)))
