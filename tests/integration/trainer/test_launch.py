"""The launcher of a trainer's ranks, with ranks that only end in one way or another."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ports import free_port

HERE = Path(__file__).parent
RANK = HERE / "stub_rank.py"
DEADLINE_S = 60.0
SHUTDOWN_S = 3
pytestmark = pytest.mark.timeout(300)


class Launches:
    """The launchers of one test, one for each node."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self.server, self.directory = server, directory
        self.pids: list[int] = []

    def start(self, *behaviours: str, nodes: int = 1) -> None:
        """Start as many ranks as there are behaviours, shared out to the nodes."""
        port = str(free_port())
        meeting = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", port]
        options = [*meeting, "--nproc-per-node", str(len(behaviours) // nodes)]
        ranks = [str(RANK), str(self.directory), json.dumps(behaviours)]
        self.launch(*([*options, "--node-rank", str(node), *ranks] for node in range(nodes)))

    def launch(self, *nodes: list[str]) -> None:
        """Start a launcher with each of these arguments."""
        logs = [str(self.directory / f"node-{node}.log") for node in range(len(nodes))]
        cases = [{"arguments": arguments, "log": log} for arguments, log in zip(nodes, logs, strict=True)]
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(cases) + "\n")
        self.server.stdin.flush()
        self.pids = self._answer()

    def codes(self) -> list[int]:
        """Wait for the end: the launchers' exit codes."""
        return self._answer()

    def up(self, ranks: int) -> list[Any]:
        """Wait until the ranks run: what each says of itself."""
        files = [self.directory / f"up-{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() and file.read_text() for file in files), f"ranks up: {self.log()}")
        return [json.loads(file.read_text()) for file in files]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    def _answer(self) -> list[int]:
        assert self.server.stdout is not None
        answer: list[int] = json.loads(self.server.stdout.readline())
        return answer


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def waiting_node(node: int, port: int) -> list[str]:
    """Arguments of one node of two, the other of which is not there."""
    meeting = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [*meeting, str(RANK)]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
    command = [sys.executable, str(HERE / "launch_server.py")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def launches(server: subprocess.Popen[str], tmp_path: Path) -> Launches:
    return Launches(server, tmp_path)


@pytest.mark.parametrize(
    ("behaviours", "code", "said"),
    [
        (("exit 0", "exit 0"), 0, ""),
        (("tell 2", "tell 2"), 2, "rank [01] failed, with exit code 2: cannot train: the moon is full"),
        (("late", "exit 2"), 2, "rank 0 failed, with exit code 2: cannot train: the moon is full"),
        (("wait", "tell 3"), 3, "rank 1 failed, with exit code 3: cannot train: the moon is full"),
        (("wait", "exit 1"), 1, "rank 1 failed, with exit code 1"),
        (("wait", "die"), 137, "rank 1 failed, by SIGKILL"),
    ],
)
def test_the_first_rank_to_fail_gives_exit_code_and_last_line(
    launches: Launches, behaviours: tuple[str, ...], code: int, said: str
) -> None:
    launches.start(*behaviours)
    assert launches.codes() == [code], launches.log()
    assert "Traceback" not in launches.log()
    last = (launches.log().splitlines() or [""])[-1]
    assert re.search(f"{said}$", last), launches.log()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_the_code_of_the_ranks_after_their_checkpoint_even_if_it_comes_twice(
    launches: Launches, signum: signal.Signals
) -> None:
    launches.start("save", "save")
    launches.up(2)
    os.kill(launches.pids[0], signum)
    until(lambda: f"Received {signum:d} death signal" in launches.log(), "the signal is taken")
    os.kill(launches.pids[0], signum)
    assert launches.codes() == [128 + signum], launches.log()
    assert {path.name for path in launches.directory.glob("saved-*")} == {"saved-0", "saved-1"}


def test_ranks_that_do_not_end_are_killed_when_their_time_is_over(launches: Launches) -> None:
    launches.start("ignore", "wait")
    pids = [pid for pid, *_ in launches.up(2)]
    began = time.monotonic()
    os.kill(launches.pids[0], signal.SIGTERM)
    assert launches.codes() == [137], launches.log()
    assert time.monotonic() - began > SHUTDOWN_S - 1
    assert not any(map(psutil.pid_exists, pids))


def test_the_ranks_of_several_nodes_are_one_world(launches: Launches) -> None:
    launches.start(*["exit 0"] * 4, nodes=2)
    assert launches.codes() == [0, 0], launches.log()
    worlds = {(world, master, node) for _, world, master, node in launches.up(4)}
    assert worlds == {("4", "127.0.0.1", "0"), ("4", "127.0.0.1", "1")}


def test_each_node_ends_with_the_code_of_its_own_ranks(launches: Launches) -> None:
    launches.start("wait", "exit 2", "wait", "exit 3", nodes=2)
    assert launches.codes() == [2, 3], launches.log()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_waits_for_the_first_one(launches: Launches, signum: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        first.settimeout(DEADLINE_S)
        launches.launch(waiting_node(1, first.getsockname()[1]))
        connection, _ = first.accept()
        with connection:
            os.kill(launches.pids[0], signum)
            assert launches.codes() == [128 + signum], launches.log()
    assert f"{signum.name} before the ranks were started" in launches.log()


def test_a_signal_ends_the_first_node_while_it_waits_for_the_others(launches: Launches) -> None:
    port = free_port()
    launches.launch(waiting_node(0, port))
    until(lambda: listens(port), f"it waits: {launches.log()}")
    os.kill(launches.pids[0], signal.SIGTERM)
    assert launches.codes() == [143], launches.log()


def test_options_that_make_no_sense_are_bad_input(launches: Launches) -> None:
    launches.launch(["--nnodes", "2:1", str(RANK)])
    assert launches.codes() == [2]
    assert "cannot start the trainer's ranks: min_nodes must be" in launches.log()
