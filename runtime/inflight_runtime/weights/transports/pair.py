"""One pair of the star: a process group of the trainer (rank 0) and one server's workers, beside every default group.

Measured on torch 2.13 (gloo): a broadcast of the sender waits until the receiver has posted its own, and
``ProcessGroupGloo.abort()`` does not wake it. What ends a wait: the operation's own timeout, or the peer closing its
side ("Connection closed by peer", within milliseconds). After either the pair is dead for good; a fresh one is needed.

Not proved here: ``nccl``. It is built by the same rules (``ProcessGroupNCCL`` on the same store, ``abort()`` on close)
and has never run on this code's test machines, which have no GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed

from inflight_runtime.weights.errors import WeightTransferError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

Backend = Literal["gloo", "nccl"]
_c10d: Final[Any] = torch.distributed
"""torch's own type stubs know these classes only in part, and under other names than they have."""
_ENVIRONMENT: Final = threading.Lock()


def serve_store(host: str, timeout_s: float = 60.0) -> tuple[TCPStore, int]:
    """Open the rendezvous of all pairs, once per trainer, on a free port of ``host`` alone.

    The port is bound before torch gets it, so nobody can take it in between. Keep the store alive; do not use it for
    waiting (a store client serves one call at a time), pairs bring clients of their own.

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        store = _c10d.TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


class PairGroup:
    """A joined pair. One thread at a time may broadcast; :meth:`close` may be called from any thread."""

    def __init__(self, group: Any, *, tag: str, rank: int, world_size: int, backend: Backend, timeout_s: float) -> None:
        self.tag = tag
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self._group: Any = group
        self._lock = threading.Lock()

    @classmethod
    def join(
        cls,
        *,
        address: str,
        port: int,
        tag: str,
        rank: int,
        world_size: int,
        backend: Backend,
        timeout_s: float,
        store: Store | None = None,
    ) -> PairGroup:
        """Meet the other ranks under ``tag``; blocks until all are there.

        Args:
            address: of the trainer's store, also chooses the interface that gloo binds to.
            port: of the trainer's store.
            tag: unique for every attempt; both sides name the same.
            rank: 0 is the trainer.
            world_size: 2, or more when a server has several workers.
            backend: ``gloo`` for CPU tensors, ``nccl`` for CUDA tensors.
            timeout_s: for the rendezvous, and the default for each broadcast.
            store: used instead of a client of its own; it must not be shared with another waiting pair.

        Raises:
            WeightTransferError: the others did not come in time, or the store is not reachable.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            base = store if store is not None else _c10d.TCPStore(address, port, None, False, timeout, False)
            prefix = _c10d.PrefixStore(tag, base)
            if backend == "gloo":
                group = _gloo(prefix, rank, world_size, timeout, _interface(address, port))
            else:
                group = _nccl(prefix, rank, world_size, timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise WeightTransferError(
                f"rank {rank} of {world_size} cannot join the weight group {tag!r} at {address}:{port} "
                f"within {timeout_s:g} s: {_first_line(error)}"
            ) from error
        return cls(group, tag=tag, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._group is None

    def broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """Send (rank 0) or receive (others) one contiguous tensor, and wait for it.

        Args:
            tensor: the same size on every rank; on the CPU for gloo, on the GPU for nccl.
            timeout_s: how long to wait for the peer; the pair's own timeout by default.

        Raises:
            WeightTransferError: the peer is gone or did not answer in time. Close the pair: it cannot be used again.
        """
        group = self._group
        if group is None:
            raise WeightTransferError(f"weight group {self.tag!r} is closed")
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(0.001, self.timeout_s if timeout_s is None else timeout_s))
        try:
            group.broadcast([tensor], options).wait()
            if self.backend == "nccl":
                # wait() only orders streams; the bytes must be there before they are digested or committed.
                torch.cuda.current_stream(tensor.device).synchronize()
        except (RuntimeError, ValueError) as error:
            raise WeightTransferError(f"weight group {self.tag!r}: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group; the peer's pending and later broadcasts fail at once. Safe to call twice."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()


def _gloo(store: Store, rank: int, world_size: int, timeout: timedelta, interface: str) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=interface)]
    return _c10d.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default a timeout ends the whole process (torch's NCCL watchdog); a broken pair must only raise in wait().
    with _ENVIRONMENT, _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return _c10d.ProcessGroupNCCL(store, rank, world_size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable that torch reads once per group, for this group alone."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _interface(address: str, port: int) -> str:
    """The local address from which ``address`` is reached: gloo binds there, not to what the hostname resolves to."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
