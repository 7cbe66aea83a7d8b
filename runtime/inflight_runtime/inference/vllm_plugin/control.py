"""A line from the API process to each worker that does not go through the engine's loop.

An RPC waits for the engine step that is running, and so does every poll for its result. Receiving weights needs no
engine: its calls go over a Unix socket to threads of the worker, answered when there is an answer. One object per line:
``{"id", "call", "arguments"}`` and ``{"id", "result"}`` or ``{"id", "error"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""A manifest of a large model has thousands of tensors."""
ACCEPT_TIMEOUT_S: Final = 60.0


def commit_report(number: int) -> str:
    """Name of the promise that a commit's outcome keeps."""
    return f"commit {number}"


class ControlError(RuntimeError):
    """The worker's call failed, in its own words, or the worker is gone."""


class ControlServer:
    """The worker's end: takes one connection and runs each call in a thread of its own."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]]) -> None:
        """Listen in a directory that only this user can enter.

        Args:
            calls: by name; take the call's arguments by keyword, return what JSON can hold.
        """
        self._calls = calls
        self._directory = tempfile.mkdtemp(prefix="inflight-")
        self.path = str(Path(self._directory) / "control")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(ACCEPT_TIMEOUT_S)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        threading.Thread(target=self._serve, name="inflight-control", daemon=True).start()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            logger.exception("nobody connected to the control socket")
            return
        finally:
            self._listener.close()
            # Nobody else is to connect, and a killed process leaves nothing behind.
            shutil.rmtree(self._directory, ignore_errors=True)
        connection.settimeout(None)
        self._connection = connection
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                threading.Thread(
                    target=self._answer, args=(json.loads(line),), name="inflight-weights", daemon=True
                ).start()

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = {"result": self._calls[message["call"]](**message["arguments"])}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._send({"id": message["id"], **answer})

    def report(self, promise: str, result: Any) -> None:
        """Give a result that was not called for over this line, from any thread; see :meth:`ControlClient.promise`."""
        self._send({"id": promise, "result": result})

    def _send(self, answer: dict[str, Any]) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError), self._sending:
                connection.sendall(json.dumps(answer).encode() + b"\n")


class ControlClient:
    """The API process's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int | str, asyncio.Future[Any]] = {}
        self._lost = ""
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, path: str) -> ControlClient:
        """Connect to a worker.

        Raises:
            OSError: it does not listen.
        """
        return cls(*await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES))

    @contextlib.contextmanager
    def promise(self, name: int | str) -> Iterator[asyncio.Future[Any]]:
        """What the worker will :meth:`~ControlServer.report` under ``name`` within this context.

        The future fails with :class:`ControlError` when the worker is gone.
        """
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        if self._lost:
            future.set_exception(ControlError(self._lost))
        try:
            yield future
        finally:
            self._waiting.pop(name, None)
            future.cancel()

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run a call in the worker. Cancelling it only stops waiting.

        Raises:
            ControlError: it failed, or the worker is gone.
        """
        number = next(self._ids)
        with self.promise(number) as future:
            if not self._lost:
                message = {"id": number, "call": name, "arguments": arguments}
                self._writer.write(json.dumps(message).encode() + b"\n")
            return await future

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is None or future.done():
                    continue
                if "error" in answer:
                    future.set_exception(ControlError(answer["error"]))
                else:
                    future.set_result(answer["result"])
        except (OSError, ValueError) as error:
            logger.warning("control socket: %s", error)
        finally:
            self._lost = "the worker is gone: its control socket has closed"
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ControlError(self._lost))
            self._writer.close()
