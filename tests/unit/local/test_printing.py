"""``inflight logs`` and ``status --watch`` of a local run."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from inflight_runtime.local import printing
from inflight_runtime.local.printing import GrowingFile, show_logs
from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError, RunRecord
from inflight_runtime.local.watching import watch_status
from inflight_runtime.terminal import PrefixedLines


def run_directory(path: Path, **logs: str) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create("job", RunRecord("letters", "/job.yaml", ()))
    for name, text in logs.items():
        directory.log(name.replace("_", "-")).write_text(text)
    return directory


def shown(directory: RunDirectory, what: str = "", tail: int | None = None) -> list[str]:
    file = io.StringIO()
    assert show_logs(directory, what, PrefixedLines(Console(file=file)), tail=tail, follow=False) == 0
    return file.getvalue().splitlines()


@given(st.lists(st.text("ab", max_size=5), max_size=30), st.booleans(), st.integers(0, 35), st.integers(1, 8))
def test_the_last_lines_are_found_whatever_the_length_of_a_block(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ended: bool, tail: int, block: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "x.log"
    lines = [*lines, "last"]
    path.write_text("\n".join(lines) + ("\n" if ended else ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printing, "BLOCK", block)
        assert GrowingFile(path, tail).lines(last=True) == (lines[-tail:] if tail else [])


def test_all_processes_side_by_side_one_role_or_one_of_them(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, inference_0="a\nb\n", inference_1="c\x1b[31m\td", trainer="e\n")
    assert shown(directory) == ["inference-0 | a", "inference-0 | b", "inference-1 | c       d", "trainer | e"]
    assert shown(directory, "inference", tail=1) == ["inference-0 | b", "inference-1 | c       d"]
    assert shown(directory, "inference-1") == ["inference-1 | c       d"]
    with pytest.raises(RunDirectoryError, match="no log of actor; there are inference-0, inference-1, trainer"):
        shown(directory, "actor")


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, trainer="load:   0%\rload: 100%\r\nnext\r\n\r\n")
    assert shown(directory) == ["trainer | load: 100%", "trainer | next", "trainer | "]


def test_what_is_written_and_what_begins_later_is_followed_until_nobody_runs_the_run(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, trainer="one\ntwo\nth")
    running = RunDirectory(tmp_path)
    running.lock()
    file = io.StringIO()
    looks = 0

    def meanwhile(_: float) -> None:
        nonlocal looks
        looks += 1
        with directory.log("trainer").open("a") as log:
            log.write("ree\nfour" if looks == 1 else "\n")
        if looks == 2:
            directory.log("inference-0").write_text("begun\n")
        if looks == 3:
            assert running._lock is not None
            running._lock.close()

    out = PrefixedLines(Console(file=file))
    assert show_logs(directory, "", out, tail=1, follow=True, wait=meanwhile) == 0
    assert file.getvalue().splitlines() == ["trainer | three", "trainer | four", "inference-0 | begun", "trainer | "]


def test_a_file_that_is_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("a longer line\n")
    file = GrowingFile(path, None)
    assert file.lines() == ["a longer line"]
    path.write_text("new\n")
    assert file.lines() == ["new"]
    path.unlink()
    assert file.lines() == []


@pytest.mark.parametrize(("outcome", "code"), [("succeeded", 0), ("failed", 1), ("", 1)])
def test_watching_a_run_that_nobody_runs_ends_at_once(tmp_path: Path, outcome: str, code: int) -> None:
    directory = RunDirectory(tmp_path)
    directory.create("job", RunRecord("letters", "/job.yaml", (), outcome=outcome))
    file = io.StringIO()
    assert watch_status(directory, Console(file=file, width=200)) == code
    assert (outcome or "not running") in file.getvalue()
