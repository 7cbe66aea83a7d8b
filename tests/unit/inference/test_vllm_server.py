"""What a forked engine keeps of its API server; that the two work together is tested with live servers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from inflight_runtime.inference.vllm_server import EngineContext

DEADLINE_S = 20.0


def engine(up: Connection, kept: int | None = None) -> None:
    """Tells that it runs, by the socket ``kept`` if one is given, and goes on until it is killed."""
    signal.signal(signal.SIGTERM, lambda *_: up.send("told"))
    if kept is not None:
        os.write(kept, b"kept")
    up.send("up")
    time.sleep(2 * DEADLINE_S)


@contextlib.contextmanager
def running(kept: int | None = None) -> Iterator[tuple[BaseProcess, Connection]]:
    context = EngineContext()
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs, kept))
    process.start()
    try:
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == "up"
        yield process, ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_an_engine_that_outlives_its_server_does_not_hold_its_port(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as listener:
        address = listener.getsockname()
        with running():
            listener.close()
            socket.create_server(address, family=family).close()


def test_an_engine_keeps_its_other_sockets() -> None:
    near, far = socket.socketpair()
    with near, far, running(kept=far.fileno()):
        near.settimeout(DEADLINE_S)
        assert near.recv(10) == b"kept"


def test_a_signal_to_the_engine_is_none_to_its_server() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        before = signal.set_wakeup_fd(far.fileno())
        try:
            with running() as (process, connection):
                process.terminate()
                assert connection.poll(DEADLINE_S)
                assert connection.recv() == "told"
                with pytest.raises(BlockingIOError):
                    near.recv(1)
        finally:
            signal.set_wakeup_fd(before)
