from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from inflight_runtime.trainer.checkpoint import CheckpointError, CheckpointStore, read_checkpoint
from inflight_runtime.trainer.loop import start_checkpoint


def write(directory: Path, content: bytes = b"state" * 100) -> None:
    (directory / "model").mkdir()
    (directory / "model/model.safetensors").write_bytes(content)
    (directory / "trainer.pt").write_bytes(content * 2)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "job", keep=2)


def test_a_checkpoint_is_found_again(store: CheckpointStore) -> None:
    assert store.newest_whole() is None
    saved = store.save(12, write, None)
    assert saved.path.name == "step-00000012"
    assert store.newest_whole() == saved
    assert (store.directory / "LATEST").read_text() == "step-00000012\n"


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(step, write, None)
    assert store.steps() == [2, 3]
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "step-00000002", "step-00000003"]


def test_tokenizer_files_go_with_the_model_and_weights_do_not(store: CheckpointStore, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json"):
        (source / name).write_text("from the model")
    path = store.save(1, write, source).path / "model"
    assert (path / "tokenizer.json").read_text() == "from the model"
    assert (path / "chat_template.jinja").exists()
    assert (path / "model.safetensors").read_bytes() == b"state" * 100


@pytest.mark.parametrize("seed", range(12))
def test_one_that_was_cut_off_anywhere_is_passed_over(store: CheckpointStore, seed: int) -> None:
    whole = store.save(1, write, None)
    path = store.save(2, write, None).path
    rng = random.Random(seed)
    victim = rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    os.truncate(victim, rng.randrange(victim.stat().st_size))
    assert store.newest_whole() == whole


@pytest.mark.parametrize("name", ["model/model.safetensors", "trainer.pt", "runtime.json"])
def test_one_with_a_missing_file_is_passed_over(
    store: CheckpointStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = store.save(1, write, None)
    (store.save(2, write, None).path / name).unlink()
    assert store.newest_whole() == whole
    assert "passed over" in caplog.text
    assert name in caplog.text


def test_a_flipped_bit_is_noticed(store: CheckpointStore) -> None:
    path = store.save(1, write, None).path
    data = bytearray((path / "trainer.pt").read_bytes())
    data[7] ^= 1
    (path / "trainer.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"trainer\.pt is damaged"):
        read_checkpoint(path)
    assert store.newest_whole() is None


def test_a_failed_write_leaves_the_one_before_and_no_rubbish(store: CheckpointStore) -> None:
    whole = store.save(1, write, None)

    def fail(directory: Path) -> None:
        write(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device. The one of step 1 is untouched"):
        store.save(2, fail, None)
    assert store.newest_whole() == whole
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "step-00000001"]


def test_a_process_killed_while_writing_leaves_nothing_that_counts(store: CheckpointStore) -> None:
    whole = store.save(1, write, None)
    half = store.directory / ".writing-step-00000002"
    half.mkdir()
    write(half)
    assert store.newest_whole() == whole
    assert not half.exists()


def test_a_damaged_one_does_not_count_as_kept(store: CheckpointStore) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    (path / "trainer.pt").unlink()
    store.newest_whole()
    assert store.whole_steps() == [1]
    store.save(3, write, None)
    assert store.steps() == [1, 3]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(store: CheckpointStore) -> None:
    path = store.save(2, write, None).path
    (path / "trainer.pt").unlink()
    assert store.newest_whole() is None
    assert store.save(2, write, None) == store.newest_whole()
    assert store.whole_steps() == [2]


def test_later_ones_of_a_lost_timeline_are_removed(store: CheckpointStore) -> None:
    store.save(8, write, None)
    store.save(4, write, None)
    assert store.steps() == [4]


def test_a_run_may_start_from_a_checkpoint_or_from_the_newest_of_a_directory(store: CheckpointStore) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    assert start_checkpoint(path) == path
    assert start_checkpoint(store.directory) == path
    (path / "trainer.pt").unlink()
    assert start_checkpoint(store.directory).name == "step-00000001"
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        start_checkpoint(store.directory / "nothing")
