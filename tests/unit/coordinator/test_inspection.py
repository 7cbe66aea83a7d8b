from __future__ import annotations

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


@given(groups(max_attempts=2), st.data())
def test_nothing_passes_that_decoding_refuses(group: Group, data: st.DataObject) -> None:
    raw = msgpack.unpackb(encode_group(group))
    path = data.draw(st.sampled_from(_paths(raw)))
    at = raw
    for key in path[:-1]:
        at = at[key]
    if isinstance(at[path[-1]], bytes) and at[path[-1]] and data.draw(st.booleans()):
        changed = bytearray(at[path[-1]])
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        at[path[-1]] = bytes(changed)
    else:
        at[path[-1]] = data.draw(_JUNK)
    payload = msgpack.packb(raw)
    try:
        quick = inspection._quick(payload)
    except Exception:
        return
    decode_group(payload)
    assert facts(quick) == facts(inspection._thorough(payload))


@pytest.mark.parametrize(
    "payload", [b"", b"\x00", b"not msgpack at all", msgpack.packb({"format": 2}), msgpack.packb([])]
)
def test_rubbish_is_refused_with_a_message(payload: bytes) -> None:
    with pytest.raises(InvalidSampleError):
        inspect(payload)


def test_numbers_that_the_ledger_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidSampleError, match="out of range"):
        inspect(encode_group(group_for(2**62)))
