from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.trainer import manifest
from inflight_runtime.trainer.checkpoint import CheckpointStore, start_checkpoint
from inflight_runtime.trainer.manifest import CheckpointError, DamagedError, read_checkpoint

NOBODY = 65534


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


def files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_noticed_and_the_one_before_is_taken(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), "job", keep=3)
        whole = store.save(1, write, None)
        path = store.save(2, lambda place: write(place, b"another"), None).path
        victim = data.draw(st.sampled_from(files(path)))
        before = victim.read_bytes()
        match data.draw(st.sampled_from(["cut off", "changed", "emptied", "lost", "a directory"])):
            case "cut off":
                os.truncate(victim, data.draw(st.integers(0, len(before) - 1)))
            case "changed":
                place = data.draw(st.integers(0, len(before) - 1))
                other = data.draw(st.integers(0, 255).filter(lambda byte: byte != before[place]))
                victim.write_bytes(before[:place] + bytes([other]) + before[place + 1 :])
            case "emptied":
                os.truncate(victim, 0)
            case "lost":
                victim.unlink()
            case "a directory":
                victim.unlink()
                victim.mkdir()
        try:
            found = store.newest_whole()
        except CheckpointError:  # a manifest may be changed into that of another format, step or job
            assert victim.name == "runtime.json"
            assert len(files(path)) == 3, "nothing is removed before somebody has looked at it"
        else:
            # White space of the manifest means nothing.
            assert found == whole or (
                victim.name == "runtime.json" and json.loads(before) == json.loads(victim.read_text())
            )


@pytest.mark.parametrize("name", ["model/config.json", "model/model.safetensors", "trainer.pt", "runtime.json"])
def test_what_was_cut_off_is_named_in_the_log(
    store: CheckpointStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def write_all(directory: Path) -> None:
        write(directory)
        (directory / "model/config.json").write_text("{}" * 40)

    whole = store.save(1, write_all, None)
    victim = store.save(2, write_all, None).path / name
    rng = random.Random(name)
    content = victim.read_bytes()
    for _ in range(10):
        caplog.clear()
        os.truncate(victim, rng.randrange(len(content)))
        assert store.newest_whole() == whole
        assert f"passed over: {store.directory}/step-00000002: {name} " in caplog.text
        assert "cut off" in caplog.text
        assert "going on from step 1" in caplog.text
        victim.write_bytes(content)


@pytest.mark.parametrize("name", ["model/model.safetensors", "trainer.pt", "runtime.json"])
def test_one_with_a_missing_file_is_passed_over(
    store: CheckpointStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = store.save(1, write, None)
    (store.save(2, write, None).path / name).unlink()
    assert store.newest_whole() == whole
    assert "passed over" in caplog.text
    assert name in caplog.text


def test_when_none_is_whole_nothing_is_begun_anew_and_nothing_removed(store: CheckpointStore) -> None:
    for step in (1, 2):
        (store.save(step, write, None).path / "trainer.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints in .* is whole.*step-00000002: trainer.pt is"
    ):
        store.newest_whole()
    assert store.steps() == [1, 2]


def a_file_more(path: Path) -> None:
    (path / "model/model-00001-of-00002.safetensors").write_bytes(b"weights")


def another_job(path: Path) -> None:
    change(path, job="other")


def another_format(path: Path) -> None:
    change(path, format=2)


def another_step(path: Path) -> None:
    change(path, step=7)


def a_link_in_it(path: Path) -> None:
    (path / "trainer.pt").rename(path.parent / "elsewhere")
    (path / "trainer.pt").symlink_to(path.parent / "elsewhere")


def a_link_to_it(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def change(path: Path, **fields: Any) -> None:
    body = json.loads((path / "runtime.json").read_text())
    (path / "runtime.json").write_text(json.dumps(body | fields))


@pytest.mark.parametrize(
    ("happen", "message"),
    [
        (a_file_more, r"model/model-00001-of-00002.safetensors was added .* move it elsewhere"),
        (another_job, "is a checkpoint of job 'other', this is 'job'"),
        (another_format, "has format 2, this version reads format 1: go on with the version that wrote it"),
        (another_step, r"step-00000002 is the checkpoint of step 7: give it its own name again"),
        (a_link_in_it, "trainer.pt is a symbolic link: put the file"),
        (a_link_to_it, "step-00000002 is a symbolic link: put the directory"),
    ],
)
def test_what_somebody_can_mend_is_refused_and_stays(store: CheckpointStore, happen: Any, message: str) -> None:
    store.save(1, write, None)
    happen(store.save(2, write, None).path)
    before = sorted(path.relative_to(store.directory) for path in store.directory.rglob("*"))
    with pytest.raises(CheckpointError, match=message) as refusal:
        store.newest_whole()
    assert not isinstance(refusal.value, DamagedError)
    assert sorted(path.relative_to(store.directory) for path in store.directory.rglob("*")) == before


def test_notes_beside_a_checkpoint_do_no_harm(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    saved = store.save(1, write, None)
    for name in ("scores.json", ".nfs0001", "model/.DS_Store"):
        (saved.path / name).write_text("?")
    (saved.path / "plots").mkdir()
    assert store.newest_whole() == saved
    assert "scores.json is not part of the checkpoint" in caplog.text
    assert ".nfs" not in caplog.text


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """As a user for whom permissions count, which they do not for root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("hidden", ["checkpoints", "checkpoints/step-00000002", "checkpoints/step-00000002/trainer.pt"])
def test_what_may_not_be_read_is_no_reason_to_go_back(hidden: str) -> None:
    here = Path(tempfile.mkdtemp())  # pytest's own directories are closed to others
    try:
        here.chmod(0o755)
        store = CheckpointStore(here / "checkpoints", "job", keep=3)
        store.save(1, write, None)
        store.save(2, write, None)
        (here / hidden).chmod(0)
        with without_rights(), pytest.raises(CheckpointError, match=r"may not be read|cannot be read"):
            store.newest_whole()
        (here / hidden).chmod(0o755)
        assert store.newest_whole() is not None
        assert store.steps() == [1, 2]
    finally:
        shutil.rmtree(here)


def test_a_disk_that_does_not_answer_is_no_reason_to_go_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, write, None)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "_sha256", fail)
    with pytest.raises(OSError, match=r"step-00000001: .* cannot be read: Input/output error"):
        store.newest_whole()


def test_a_file_in_place_of_a_checkpoint_or_of_the_directory(store: CheckpointStore, tmp_path: Path) -> None:
    whole = store.save(1, write, None)
    (store.directory / "step-00000002").write_text("not a directory")
    assert store.newest_whole() == whole
    assert store.save(3, write, None).step == 3
    assert store.steps() == [1, 3]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint directory .*/file cannot be read: Not a directory"):
        CheckpointStore(tmp_path / "file", "job", 1).newest_whole()


def test_a_link_is_never_followed_when_old_ones_are_removed(store: CheckpointStore, tmp_path: Path) -> None:
    elsewhere = store.save(1, write, None).path.rename(tmp_path / "elsewhere")
    (store.directory / "step-00000001").symlink_to(elsewhere)
    store.save(2, write, None)
    store.save(3, write, None)
    assert store.steps() == [2, 3]
    assert read_checkpoint(elsewhere).step == 1


def test_a_flipped_bit_is_noticed(store: CheckpointStore) -> None:
    path = store.save(1, write, None).path
    data = bytearray((path / "trainer.pt").read_bytes())
    data[7] ^= 1
    (path / "trainer.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"trainer\.pt is damaged"):
        read_checkpoint(path)


def test_a_failed_write_leaves_the_one_before_and_no_rubbish(store: CheckpointStore) -> None:
    whole = store.save(1, write, None)

    def fail(directory: Path) -> None:
        write(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError,
        match=r"step 2 .*No space left on device \(\d+\.\d MiB are free there\)\. The one of step 1 is untouched",
    ):
        store.save(2, fail, None)
    assert store.newest_whole() == whole
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "step-00000001"]


def test_the_reason_of_the_system_is_found_behind_that_of_a_library(store: CheckpointStore) -> None:
    def fail(directory: Path) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0\nframe #0: c10")

    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(1, fail, None)

    def fail_alone(directory: Path) -> None:
        raise RuntimeError("unexpected pos 64 vs 0\nframe #0: c10")

    with pytest.raises(CheckpointError, match=r"unexpected pos 64 vs 0 \(.*There is none before it") as failure:
        store.save(1, fail_alone, None)
    assert "frame" not in str(failure.value)


def test_a_failure_after_the_damaged_one_was_moved_puts_it_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    (path / "trainer.pt").unlink()
    store.newest_whole()
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-step"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="The one of step 1 is untouched"):
        store.save(2, write, None)
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["LATEST", "step-00000001", "step-00000002"]


def test_a_pointer_that_cannot_be_moved_does_not_cost_the_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(1, write, None)

    def replace(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    assert store.save(2, write, None) == store.newest_whole()
    assert "LATEST names an older checkpoint than there is" in caplog.text


def test_a_process_killed_while_writing_leaves_nothing_that_counts(store: CheckpointStore) -> None:
    whole = store.save(1, write, None)
    half = store.directory / ".writing-step-00000002"
    half.mkdir()
    write(half)
    assert store.newest_whole() == whole
    assert not half.exists()


def test_a_trainer_that_was_superseded_writes_and_removes_nothing(store: CheckpointStore) -> None:
    store.claim(1)
    store.save(4, write, None)
    newer = CheckpointStore(store.directory, "job", keep=2)
    newer.claim(2)
    for step in (8, 12):
        newer.save(step, write, None)
    with pytest.raises(CheckpointError, match="the trainer of epoch 2 has taken the directory over from epoch 1"):
        store.save(8, write, None)  # it was frozen in the middle of a save, and wakes up
    assert newer.newest_whole() == read_checkpoint(store.directory / "step-00000012")
    assert store.steps() == [8, 12]


def test_what_another_trainer_removed_while_it_was_written_is_never_taken_for_whole(store: CheckpointStore) -> None:
    whole = store.save(1, write, None)

    def write_while_another_starts(directory: Path) -> None:
        write(directory)
        assert CheckpointStore(store.directory, "job", keep=2).newest_whole() == whole
        directory.mkdir()  # a rank that writes its part late makes its directory again
        (directory / "optimizer").write_text("the last of it")

    with pytest.raises(CheckpointError, match="has been removed by a trainer that has started since"):
        store.save(2, write_while_another_starts, None)
    assert sorted(path.name for path in store.directory.iterdir()) == ["LATEST", "step-00000001"]


def test_a_directory_that_cannot_be_claimed_is_used_all_the_same(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fail)
        store.claim(3)
    assert "cannot say that it is its own now" in caplog.text
    assert store.save(1, write, None) == store.newest_whole()


def test_a_damaged_one_does_not_count_as_kept(store: CheckpointStore) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    (path / "trainer.pt").unlink()
    store.newest_whole()
    assert store.whole_steps() == [1]
    store.save(3, write, None)
    assert store.steps() == [1, 3]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(store: CheckpointStore) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    (path / "trainer.pt").unlink()
    store.newest_whole()
    assert store.save(2, write, None) == store.newest_whole()
    assert store.whole_steps() == [1, 2]


def test_later_ones_of_a_lost_timeline_are_removed(store: CheckpointStore) -> None:
    store.save(8, write, None)
    store.save(4, write, None)
    assert store.steps() == [4]


def test_a_run_may_start_from_a_checkpoint_or_from_the_newest_of_a_directory(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(1, write, None)
    path = store.save(2, write, None).path
    assert start_checkpoint(path) == path
    assert start_checkpoint(store.directory) == path
    (path / "trainer.pt").unlink()
    assert start_checkpoint(store.directory).name == "step-00000001"
    assert "step-00000002: trainer.pt is missing" in caplog.text
    with pytest.raises(CheckpointError, match="there is no checkpoint; check the path"):
        start_checkpoint(store.directory / "nothing")
    (store.directory / "step-00000001/trainer.pt").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        start_checkpoint(store.directory)
