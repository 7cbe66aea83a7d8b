"""Run directories, ports, logs, the process family."""

import json
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight_runtime.api import JobError
from inflight_runtime.local import guardian, logs
from inflight_runtime.local.guardian import Process, family
from inflight_runtime.local.launch import role_environment
from inflight_runtime.local.ports import FIRST, LAST, PortPool
from inflight_runtime.local.rundir import (
    RunDirectory,
    RunDirectoryError,
    RunRecord,
    new_run_path,
    point_latest,
    read_json_lines,
)

RECORD = RunRecord("letters", "/somewhere/job.yaml", ("spec.algorithm.steps=5",), "http://127.0.0.1:1", 7, 1.5)


def test_a_run_directory_keeps_its_record_and_a_token_of_its_own(tmp_path: Path) -> None:
    one, two = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    one.create("job: text", RECORD)
    two.create("job: text", RECORD)
    assert one.read_record() == RECORD
    assert one.job_file.read_text() == "job: text"
    assert one.token() != two.token()
    assert len(one.token()) >= 32
    assert stat.S_IMODE(one.token_file.stat().st_mode) == 0o600


def test_a_run_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("", RECORD)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        RunDirectory(tmp_path / "run").create("", RECORD)
    assert not directory.is_alive()
    directory.lock()
    assert directory.is_alive()
    with pytest.raises(RunDirectoryError, match="still going on"):
        RunDirectory(tmp_path / "run").lock()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layout": 1}', '{"layout": 99, "job": "x"}'])
def test_what_is_no_run_directory_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"is no run directory|another version"):
        RunDirectory(tmp_path).read_record()


def test_a_run_directory_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"--run-dir: .*file/run cannot be made: Not a directory"):
        RunDirectory(tmp_path / "file" / "run").create("", RECORD)


def test_two_runs_in_the_same_second_get_two_directories_and_latest_moves_on(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        path = new_run_path(tmp_path, "letters")
        path.mkdir()
        point_latest(path)
        paths.append(path)
    assert len(set(paths)) == 3
    assert (tmp_path / "latest").readlink() == Path(paths[-1].name)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    point_latest(paths[0])
    assert not (tmp_path / "latest").is_symlink()


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_json_lines(path) == []
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n{"step": 4, "rew')
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]


def test_a_text_with_line_breaks_of_unicode_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n')
    assert read_json_lines(path) == [{"text": "a\u2028b\x85c"}]


def test_ports_are_free_differ_and_lie_below_the_ephemeral_range() -> None:
    pool = PortPool()
    ports = [pool.take() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        assert FIRST <= port <= LAST
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_is_taken_cannot_be_claimed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(JobError, match="in use"):
        PortPool().claim(taken.getsockname()[1], "--coordinator-port")


def test_a_log_is_explained_by_its_last_lines_and_its_first_error_since_the_last_start(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("OldError: of a life before\n")
    since = path.stat().st_size
    body = ["\x1b[31mloading\x1b[0m", "", "  vllm.errors.KvCacheError: no room", "RuntimeError: see above"]
    body += [f"line {number}" for number in range(30)]
    with path.open("a") as handle:
        handle.write("\n".join(body) + "\n")
    assert logs.explain(path, since).splitlines() == [
        "  first error in it: vllm.errors.KvCacheError: no room",
        f"  last lines of {path}:",
        *(f"  | line {number}" for number in range(15, 30)),
    ]
    assert logs.tail(path, since, 100)[0] == "loading"
    assert "nothing in" in logs.explain(tmp_path / "none.log")


def test_a_huge_log_is_read_from_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("ValueError: long ago\n" + "x" * 2 * logs.READ_BYTES + "\nthe end\n")
    assert logs.tail(path)[-1] == "the end"
    assert logs.likely_cause(path) is None


def test_a_family_is_found_by_descent_session_and_group() -> None:
    def process(pid: int, parent: int, group: int, session: int, state: str = "S") -> Process:
        return Process(pid, parent, group, session, 0, state)

    table = {
        entry.pid: entry
        for entry in (
            process(1, 0, 1, 1),
            process(10, 1, 10, 10),  # the root
            process(11, 10, 10, 10),
            process(12, 11, 12, 12),  # a rank in a session of its own
            process(13, 1, 12, 12),  # an orphan of that session
            process(14, 1, 10, 10),  # an orphan of the root's group
            process(15, 10, 10, 10, "Z"),
            process(20, 1, 20, 20),
            process(21, 20, 20, 20),
        )
    }
    assert set(family([10], table)) == {10, 11, 12, 13, 14}
    del table[10]  # the root has died; its session still names it
    assert set(family([10], table)) == {11, 12, 13, 14}
    assert set(family([], table)) == set()


def test_the_guardian_ends_what_is_registered_and_nothing_else_when_its_pipe_closes(tmp_path: Path) -> None:
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    scratch = tmp_path / "scratch"
    (scratch / "below").mkdir(parents=True)
    kept, ended, released = (subprocess.Popen(sleep, start_new_session=True) for _ in range(3))
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, "5", str(scratch)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_until_signals_are_ignored(watcher.pid)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            watcher.send_signal(signum)
        assert watcher.stdin is not None
        watcher.stdin.write(f"+{ended.pid}\n+{released.pid}\nnonsense\n-{released.pid}\n".encode())
        watcher.stdin.close()
        assert watcher.wait(30) == 0
        assert ended.wait(30) == -signal.SIGTERM
        assert kept.poll() is None
        assert released.poll() is None
        assert not scratch.exists()
        assert tmp_path.exists()
    finally:
        for process in (kept, ended, released, watcher):
            process.kill()
            process.wait()


def wait_until_signals_are_ignored(pid: int) -> None:
    end = time.monotonic() + 30
    # All three: a session under nohup hands down an ignored SIGHUP.
    ignored = sum(1 << (signum - 1) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    while time.monotonic() < end:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
        if mask & ignored == ignored:
            return
        time.sleep(0.01)
    raise AssertionError("the guardian does not ignore signals")


def test_roles_get_few_threads_unbuffered_output_and_no_hub_unless_the_user_wants_it() -> None:
    environment = role_environment({"PATH": "/bin", "OMP_NUM_THREADS": "64"}, 1)
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert role_environment({"HF_HUB_OFFLINE": "0"}, 1)["HF_HUB_OFFLINE"] == "0"


def test_records_survive_a_crash_in_the_middle_of_writing_them(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("", RECORD)
    (tmp_path / "run" / "run.json.tmp").write_text('{"layout"')
    assert directory.read_record() == RECORD
    assert json.loads(directory.record_file.read_text())["pid"] == 7
    assert list(directory.logs.iterdir()) == []
