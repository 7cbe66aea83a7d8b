from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from streams import StreamFailedError, record_streams, servers_of


class Streaming(BaseHTTPRequestHandler):
    """Answers with server-sent events, or refuses when the model is called so."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"authorization": self.headers["Authorization"]})
        refused = body["model"] == "refused"
        self.send_response(400 if refused else 200)
        self.end_headers()
        if refused:
            self.wfile.write(b'{"error": "too long"}')
            return
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": ""}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def url() -> Iterator[str]:
    Streaming.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def run_directory(home: Path, url: str, *models: str) -> Path:
    (home / "config").mkdir()
    (home / "token").write_text("secret\n")
    for number, model in enumerate(models):
        config = {"server_id": f"inference-{number}", "advertise_url": url, "served_name": model}
        (home / "config" / f"inference-{number}.json").write_text(json.dumps(config))
    return home


def test_servers_are_read_from_their_configs(tmp_path: Path) -> None:
    found = servers_of(run_directory(tmp_path, "http://127.0.0.1:1", "first", "second"))
    assert [(server.server_id, server.model) for server in found] == [
        ("inference-0", "first"),
        ("inference-1", "second"),
    ]


def test_each_token_of_each_stream_is_noted_with_its_server(tmp_path: Path, url: str) -> None:
    streams = record_streams(run_directory(tmp_path, url, "a", "b"), per_server=2, tokens=5, seconds=0.2)
    whole = [stream for stream in streams if len(stream.arrivals) == 5]
    assert {stream.server_id for stream in whole} == {"inference-0", "inference-1"}
    assert len(whole) >= 4
    assert all(stream.arrivals == sorted(stream.arrivals) for stream in streams)
    assert all(body["ignore_eos"] and body["authorization"] == "Bearer secret" for body in Streaming.asked)


def test_a_server_that_refuses_is_told_with_its_words(tmp_path: Path, url: str) -> None:
    with pytest.raises(StreamFailedError, match=r"HTTP 400: .*too long"):
        record_streams(run_directory(tmp_path, url, "refused"), per_server=1, tokens=5, seconds=5)


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StreamFailedError, match="a streamed generation failed"):
        record_streams(run_directory(tmp_path, "http://127.0.0.1:1", "a"), per_server=1, tokens=5, seconds=5)
