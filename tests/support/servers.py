"""Inference servers of the tests: the real process, started and ended with its whole group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib import request as urlrequest
from urllib.error import HTTPError, URLError

from inflight_runtime.config.roles import InferenceConfig, ModelFiles
from support.ports import free_port

TOKEN = "a-token-for-tests"  # not a secret
START_DEADLINE_S = 240.0
END_GRACE_S = 15.0
LOG_LINES = 60


@dataclass
class RunningServer:
    """A server process that answers.

    Attributes:
        url: base URL.
        token: its bearer token.
        process: the process, leader of its own group.
        log_path: its standard output and error.
    """

    config: InferenceConfig
    url: str
    token: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def headers(self) -> dict[str, str]:
        """What a caller sends."""
        return {"Authorization": f"Bearer {self.token}"}

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[int, Any]:
        """One request; status and the decoded JSON body (``None`` when empty, text when it is no JSON)."""
        data = json.dumps(body).encode() if body is not None else None
        sent = {"Content-Type": "application/json"} | (self.headers if headers is None else headers)
        call = urlrequest.Request(self.url + path, data, sent, method=method)
        try:
            with urlrequest.urlopen(call, timeout=timeout_s) as reply:
                return reply.status, _decode(reply.read())
        except HTTPError as error:
            return error.code, _decode(error.read())

    def status(self) -> dict[str, Any]:
        """``GET /runtime/v1/status``."""
        status, body = self.call("GET", "/runtime/v1/status")
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The newest lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def make_config(directory: Path, model: Path, **changes: Any) -> InferenceConfig:
    """A server config for a model directory; its token file is written to ``directory``.

    The coordinator's address leads nowhere unless given: a server must not need one to serve.
    """
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    port = free_port()
    settings: dict[str, Any] = {
        "job": "test",
        "server_id": "i0",
        "engine": "vllm",
        "port": port,
        "advertise_url": f"http://127.0.0.1:{port}",
        "coordinator_url": "http://127.0.0.1:9",
        "token_file": token_file,
        "model": ModelFiles(path=str(model), tokenizer=str(model), max_length=512),
        "served_name": "policy",
        "max_concurrent": 32,
        "cpu_kv_cache_bytes": 64 * 1024 * 1024,
        "update_deadline_s": 20.0,
    }
    return InferenceConfig(**(settings | changes))


@contextlib.contextmanager
def start_server(
    config: InferenceConfig, log_path: Path, *, deadline_s: float = START_DEADLINE_S, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """Start ``python -m inflight_runtime.inference`` and wait for its status; end its process group at the end.

    Raises:
        AssertionError: it ended or did not answer in time; the message holds the end of its log.
    """
    config_file = log_path.with_suffix(".json")
    config_file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "inflight_runtime.inference", "--config", str(config_file)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | (env or {})
        )
    server = RunningServer(
        config, f"http://{config.host}:{config.port}", config.token_file.read_text(), process, log_path
    )
    try:
        wait_for_status(server, deadline_s)
        yield server
    finally:
        end_group(process)


def wait_for_status(server: RunningServer, deadline_s: float) -> None:
    """Poll the status route until it answers.

    Raises:
        AssertionError: with the end of the log.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        if (code := server.process.poll()) is not None:
            raise AssertionError(f"the server ended with {code}:\n{server.log_tail()}")
        with contextlib.suppress(URLError, ConnectionError, TimeoutError):
            if server.call("GET", "/runtime/v1/status", timeout_s=5.0)[0] == 200:
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"no status within {deadline_s:g} s:\n{server.log_tail()}")
        time.sleep(0.1)


def end_group(process: subprocess.Popen[bytes], grace_s: float = END_GRACE_S) -> None:
    """SIGTERM, then SIGKILL to the whole process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _decode(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
