"""Long generations that are streamed from a run's servers, each token's arrival noted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

CONNECT_S = 10.0
SILENCE_S = 30.0
"""Without a token for this long a stream has failed."""
PROMPT = "sort:hba"


class StreamFailedError(Exception):
    """A server did not stream as asked; the message says what it answered."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where one inference server of a run is found."""

    server_id: str
    url: str
    model: str


@dataclass(slots=True)
class Stream:
    """One generation.

    Attributes:
        server_id: where.
        arrivals: Unix time of each piece of text, one a token unless the server sent several at once.
    """

    server_id: str
    arrivals: list[float] = field(default_factory=list)


def servers_of(run_directory: Path) -> list[Server]:
    """The inference servers of a run, from their configs."""
    found = []
    for path in sorted((run_directory / "config").glob("inference-*.json")):
        config = json.loads(path.read_text())
        found.append(Server(config["server_id"], config["advertise_url"], config["served_name"]))
    return found


def record_streams(run_directory: Path, *, per_server: int, tokens: int, seconds: float) -> list[Stream]:
    """Keep generations in flight for some time.

    Args:
        run_directory: of a run that goes on.
        per_server: generations at once on each server; one that ends is followed by another.
        tokens: length of each.
        seconds: how long.

    Raises:
        StreamFailedError: a server refused, broke off or fell silent.
    """
    token = (run_directory / "token").read_text().strip()
    return asyncio.run(_record(servers_of(run_directory), token, per_server, tokens, seconds))


async def _record(servers: Iterable[Server], token: str, per_server: int, tokens: int, seconds: float) -> list[Stream]:
    streams: list[Stream] = []
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENCE_S)
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=0)

    async def one_after_the_other(session: aiohttp.ClientSession, server: Server) -> None:
        while time.monotonic() < until:
            stream = Stream(server.server_id)
            streams.append(stream)
            await _follow(session, server, stream, tokens, until)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    for _ in range(per_server):
                        group.create_task(one_after_the_other(session, server))
        except* (StreamFailedError, aiohttp.ClientError, TimeoutError) as errors:
            first = errors.exceptions[0]
            raise StreamFailedError(f"a streamed generation failed: {first!r}") from first
    return streams


async def _follow(session: aiohttp.ClientSession, server: Server, stream: Stream, tokens: int, until: float) -> None:
    body = {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise StreamFailedError(f"{server.url}: HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                stream.arrivals.append(time.time())
            elif line.startswith(b"data: [DONE]"):
                return
            if time.monotonic() > until:
                return  # leaving closes the connection, and the server drops the request
