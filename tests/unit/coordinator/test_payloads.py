from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.coordinator.payloads import PayloadError, PayloadRef, SegmentStore


@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 200))
def test_what_was_written_is_read_back_across_segments(payloads: list[bytes], segment_bytes: int) -> None:
    with TemporaryDirectory() as directory:
        store = SegmentStore(Path(directory), segment_bytes=segment_bytes)
        refs = [store.append(data) for data in payloads]
        store.sync()
        assert [store.read(ref) for ref in refs] == payloads
        store.close()
        assert [SegmentStore(Path(directory)).read(ref) for ref in refs] == payloads


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_a_torn_tail_costs_only_what_was_torn(payloads: list[bytes], data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        store = SegmentStore(Path(directory))
        refs = [store.append(payload) for payload in payloads]
        store.close()
        path = next(Path(directory).iterdir())
        size = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, size)
        again = SegmentStore(Path(directory))
        for ref, payload in zip(refs, payloads, strict=True):
            if ref.offset + 8 + ref.length <= size:
                assert again.read(ref) == payload
            else:
                with pytest.raises(PayloadError, match="damaged"):
                    again.read(ref)
        added = again.append(b"after the restart")
        assert again.read(added) == b"after the restart"
        assert added.segment > refs[-1].segment
        again.close()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    ref = store.append(b"some tokens")
    store.close()
    path = tmp_path / "00000001.seg"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(PayloadError, match=r"00000001\.seg is damaged at offset 0"):
        store.read(ref)


def test_a_missing_file_and_a_short_one_are_found_when_opening(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path)
    ref = store.append(b"x" * 100)
    store.close()
    store.check({ref.segment: ref.offset + ref.length})
    with pytest.raises(PayloadError, match="is missing"):
        store.check({7: 10})
    os.truncate(tmp_path / "00000001.seg", 50)
    with pytest.raises(PayloadError, match="has 50 bytes, 108 are expected"):
        store.check({ref.segment: ref.offset + ref.length})


def test_opening_removes_files_that_the_ledger_does_not_name(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=1)
    kept, orphan = store.append(b"kept"), store.append(b"orphan")
    store.close()
    again = SegmentStore(tmp_path)
    again.check({kept.segment: kept.length})
    assert again.closed_segments() == [kept.segment]
    with pytest.raises(PayloadError):
        again.read(orphan)


def test_the_segment_being_written_is_never_deleted(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, segment_bytes=1)
    first, second = store.append(b"a"), store.append(b"b")
    assert store.closed_segments() == [first.segment]
    with pytest.raises(ValueError, match="is being written"):
        store.delete([second.segment])
    store.delete([first.segment])
    store.delete([first.segment])
    assert store.read(second) == b"b"
    store.close()


def test_a_failed_sync_is_told_and_the_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SegmentStore(tmp_path)
    before = store.append(b"lost")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output"):
            store.sync()
    after = store.append(b"kept")
    store.sync()
    assert after.segment > before.segment
    assert store.read(PayloadRef(*after)) == b"kept"
    store.close()
