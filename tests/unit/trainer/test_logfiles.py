from __future__ import annotations

import json
import math
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from inflight_runtime.trainer.logfiles import Board, LineFile, json_line


@pytest.fixture
def limit() -> Iterator[object]:
    """Sets how large a file of this process may grow: a write beyond that fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def events(path: Path) -> list[Event]:
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_a_line_that_finds_no_room_is_left_out_whole(
    tmp_path: Path, limit: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.write({"step": 1, "loss": math.nan})
    limit(path.stat().st_size + 10)  # type: ignore[operator]
    for step in (2, 3):
        file.write({"step": step, "loss": 0.5})
    limit(resource.RLIM_INFINITY)  # type: ignore[operator]
    file.write({"step": 4, "loss": 0.25})
    file.close()
    file.write({"step": 5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": None},
        {"step": 4, "loss": 0.25},
    ]
    assert caplog.text.count("could not be written") == 1
    assert "2 entries were left out" in caplog.text


@given(st.lists(st.text(st.sampled_from('a"\\\n\r\t\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029é'), max_size=6), max_size=4))
def test_an_entry_is_one_line_for_every_reader_of_lines(texts: list[str]) -> None:
    written = "".join(json_line({"text": text}) for text in texts)
    assert [json.loads(line)["text"] for line in written.splitlines()] == texts


def test_the_board_goes_on_after_a_full_disk(tmp_path: Path, limit: object) -> None:
    board = Board(tmp_path, first_step=7)
    board.scalars(7, {"loss": 0.5, "grad_norm": math.inf})
    (path,) = tmp_path.iterdir()
    limit(path.stat().st_size + 5)  # type: ignore[operator]
    for step in range(8, 40):  # more than any queue would hold
        board.scalars(step, {"loss": 0.5})
    limit(resource.RLIM_INFINITY)  # type: ignore[operator]
    board.scalars(40, {"loss": 0.25})
    board.close()
    header, purge, *steps = events(path)
    assert header.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (7, SessionLog.START)
    assert [(event.step, [(value.tag, value.simple_value) for value in event.summary.value]) for event in steps] == [
        (7, [("loss", 0.5)]),
        (40, [("loss", 0.25)]),
    ]


def test_records_are_those_of_tensorboard(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", first_step=1)
    board.scalars(1, {"loss": 0.5})
    (path,) = (tmp_path / "board").iterdir()
    again = RecordWriter(str(tmp_path / "theirs"))
    for event in events(path):
        again.write(event.SerializeToString())
    again.close()
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
