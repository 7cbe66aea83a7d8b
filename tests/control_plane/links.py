"""A way to the API server that can be cut off without either end being told."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

CHUNK = 65_536


@dataclass(eq=False)
class _Pair:
    near: socket.socket
    far: socket.socket
    dead: bool = False


class Link:
    """Forwards TCP connections to a server, until it is cut.

    A cut is what a firewall that forgets a connection does: packets vanish, nobody is told. Connections that were open
    then, or are opened meanwhile, stay dead for good; after :meth:`mend` new ones go through.

    Args:
        server: URL of the API server.

    Attributes:
        url: where to connect to instead.
    """

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = threading.Event()
        self._ended = threading.Event()
        self._pairs: set[_Pair] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def cut(self) -> None:
        """Let every packet vanish from now on."""
        with self._lock:
            self._cut.set()
            for pair in self._pairs:
                pair.dead = True

    def mend(self) -> None:
        """Let new connections through."""
        with self._lock:
            self._cut.clear()

    def __enter__(self) -> Link:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(10)
        for pair in self._pairs:
            pair.near.close()
            pair.far.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._forward(key.data, key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        with self._lock:
            pair = _Pair(near, socket.socket(), dead=self._cut.is_set())
            self._pairs.add(pair)
        if pair.dead:
            return  # the kernel has accepted; not one byte will be read
        pair.far.connect(self._target)
        for end in (pair.near, pair.far):
            end.settimeout(10)
            self._selector.register(end, selectors.EVENT_READ, pair)

    def _forward(self, pair: _Pair, end: socket.socket) -> None:
        if pair.dead:
            self._unregister(pair)
            return
        other = pair.far if end is pair.near else pair.near
        try:
            data = end.recv(CHUNK)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._unregister(pair)
        with self._lock:
            self._pairs.discard(pair)
        pair.near.close()
        pair.far.close()

    def _unregister(self, pair: _Pair) -> None:
        for end in (pair.near, pair.far):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
