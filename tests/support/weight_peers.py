"""The other side of weight pairs, to be run in processes of their own: a bare sender or receiver, and a small server.

The processes are forked from a server that has imported torch once: importing it takes seconds on busy cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from aiohttp import web

from inflight_runtime.protocol import InitGroupRequest, ServerStatus, VersionField, WeightUpdateRequest
from inflight_runtime.types import Version
from inflight_runtime.weights.digest import digests
from inflight_runtime.weights.packing import plan_buckets
from inflight_runtime.weights.receiver import StagedReceiver
from inflight_runtime.weights.snapshot import Snapshot, SnapshotBuffers
from inflight_runtime.weights.transports.pair import PairGroup

BUCKET_BYTES = 64 * 1024
"""Several buckets even for these small weights."""
TOKEN = "a-token-for-tests"  # not a secret
START_DEADLINE_S = 120.0

Faults = dict[str, Any]


@contextlib.contextmanager
def fork_server() -> Iterator[Any]:
    """A multiprocessing context whose processes start within milliseconds; its own process ends with the block."""
    context = multiprocessing.get_context("forkserver")
    # Not this module: the fork server of Python 3.11 does not get our sys.path.
    context.set_forkserver_preload(["torch", "aiohttp.web", "inflight_runtime.weights.publisher"])
    try:
        yield context
    finally:
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextlib.contextmanager
def running(context: Any, function: Any, *args: Any) -> Iterator[Any]:
    """A process that is killed at the end of the block."""
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(10)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Some tensors, about 140 KB."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 64), "up": (128, 64), "down": (64, 128), "norm": (64,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def snapshot(step: int, epoch: int = 1) -> Snapshot:
    """Version ``epoch.step`` of :func:`weights` with the step as seed."""
    return SnapshotBuffers().capture(Version(epoch, step), weights(step).items())


def update_request(data: Snapshot, tag: str, timeout_s: float) -> WeightUpdateRequest:
    """The announcement of a snapshot."""
    return WeightUpdateRequest(
        epoch=data.version.epoch,
        step=data.version.step,
        tag=tag,
        tensors=list(data.specs),
        bucket_bytes=BUCKET_BYTES,
        digest=data.digest,
        timeout_seconds=timeout_s,
    )


def join(port: int, tag: str, rank: int, timeout_s: float) -> PairGroup:
    """A gloo pair on this machine."""
    return PairGroup.join(
        address="127.0.0.1", port=port, tag=tag, rank=rank, world_size=2, backend="gloo", timeout_s=timeout_s
    )


def play(port: int, tag: str, rank: int, behaviour: str) -> None:
    """Take part in the transfer of version 1.1, as ``behaviour`` says.

    ``whole``: all of it. ``die``: one bucket, then gone. ``hang``: one bucket, then silence. ``corrupt``: one byte of
    the last bucket is not the one that was digested.
    """
    torch.set_num_threads(1)
    pair = join(port, tag, rank, 60.0)
    data = snapshot(1)
    for bucket in plan_buckets(data.specs, BUCKET_BYTES):
        part = data.flat[bucket.start : bucket.end].clone()
        if behaviour == "corrupt" and bucket.end == data.nbytes:
            part[-3] ^= 1
        pair.broadcast(part)
        if behaviour == "die":
            os._exit(9)
        if behaviour == "hang":
            time.sleep(600)
    pair.close()


class _FaultyPair(PairGroup):
    """Breaks what it receives, or its process, when told."""

    faults: Faults

    def broadcast(self, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        super().broadcast(tensor, timeout_s)
        if self.faults["die_in_receive"]:
            os._exit(9)
        if self.faults["corrupt"]:
            self.faults["corrupt"] -= 1
            tensor[5] ^= 1


class SmallServer:
    """The weight routes of an inference server over the real receiver, with switches for faults (``POST /faults``)."""

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id
        self.boot_id = secrets.token_hex(4)
        self.faults: Faults = {
            "hold": False,  # answer updates only once this is off again
            "refuse": 0,  # so many updates with 400
            "lose": 0,  # so many replies, after the commit
            "corrupt": 0,  # so many buckets
            "die_in_receive": False,
            "broken": "",
            "refuse_join": 0,
        }
        self.pairs: dict[str, PairGroup] = {}
        self.receiver = StagedReceiver()
        self.model: dict[str, torch.Tensor] = {}
        self.version: VersionField | None = None
        self.digest = ""
        self.history: list[list[int]] = []
        self.joins = 0
        self.backends: list[str] = []
        self.released = asyncio.Event()
        self.released.set()

    def app(self) -> web.Application:
        """All routes."""
        app = web.Application()
        app.router.add_get("/runtime/v1/status", self.status)
        app.router.add_post("/init_process_group", self.init_group)
        app.router.add_post("/destroy_process_group", self.destroy_group)
        app.router.add_post("/request_weight_update", self.update)
        app.router.add_post("/faults", self.set_faults)
        app.router.add_get("/seen", self.seen)
        return app

    async def status(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        status = ServerStatus(
            server_id=self.server_id,
            boot_id=self.boot_id,
            engine="test",
            version=self.version,
            digest=self.digest,
            broken=self.faults["broken"],
            capacity=1,
            max_length=1,
        )
        return web.json_response(status.model_dump())

    async def init_group(self, request: web.Request) -> web.Response:
        body = InitGroupRequest.model_validate(await request.json())
        self.backends.append(body.backend)
        if self.faults["refuse_join"]:
            self.faults["refuse_join"] -= 1
            return web.json_response({"error": "this join is refused"}, status=400)
        pair = await asyncio.to_thread(
            _FaultyPair.join,
            address=body.master_address,
            port=body.master_port,
            tag=body.tag,
            rank=1,
            world_size=body.world_size,
            backend="gloo",
            timeout_s=body.timeout_seconds,
        )
        pair.faults = self.faults  # type: ignore[attr-defined]
        self.pairs[body.tag] = pair
        self.joins += 1
        return web.json_response({"boot_id": self.boot_id, "version": None})

    async def destroy_group(self, request: web.Request) -> web.Response:
        if (pair := self.pairs.pop((await request.json())["tag"], None)) is not None:
            pair.close()
        return web.Response(status=204)

    async def update(self, request: web.Request) -> web.Response:
        body = WeightUpdateRequest.model_validate(await request.json())
        if self.faults["refuse"]:
            self.faults["refuse"] -= 1
            return web.json_response({"error": "this update is refused"}, status=400)
        await self.released.wait()
        try:
            tensors = await asyncio.to_thread(self.receiver.receive, self.pairs[body.tag], body)
        except RuntimeError as error:
            return web.json_response({"error": str(error)}, status=502)
        self.model = {name: tensor.clone() for name, tensor in tensors}
        self.version = VersionField(epoch=body.epoch, step=body.step)
        self.digest = body.digest
        self.history.append([body.epoch, body.step])
        if self.faults["lose"]:
            self.faults["lose"] -= 1
            assert request.transport is not None
            request.transport.abort()
        times = {"receive_ms": 1.0, "pause_ms": 2.0, "commit_ms": 3.0}
        version = {"epoch": body.epoch, "step": body.step}
        return web.json_response(version | times | {"boot_id": self.boot_id, "digest": body.digest})

    async def set_faults(self, request: web.Request) -> web.Response:
        self.faults |= await request.json()
        self.released.clear() if self.faults["hold"] else self.released.set()
        return web.json_response(self.faults)

    async def seen(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "history": self.history,
                "joins": self.joins,
                "backends": self.backends,
                "pairs": sorted(self.pairs),
                "digests": dict(zip(self.model, digests(list(self.model.values())), strict=True)),
            }
        )


def serve(server_id: str, address: Connection) -> None:
    """Run a :class:`SmallServer` until killed; sends ``(boot_id, port)`` once it listens."""
    torch.set_num_threads(1)

    async def main() -> None:
        server = SmallServer(server_id)
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        address.send((server.boot_id, site._server.sockets[0].getsockname()[1]))  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    asyncio.run(main())
