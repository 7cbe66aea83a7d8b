"""The trainer's side of a weight update against one server: real pairs, real snapshots, no coordinator."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from inflight_runtime.protocol import WeightUpdateRequest
from inflight_runtime.trainer.layout import CheckpointLayout
from inflight_runtime.types import Version
from inflight_runtime.weights.packing import plan_buckets
from inflight_runtime.weights.snapshot import Snapshot, SnapshotBuffers
from inflight_runtime.weights.transports.pair import PairGroup, serve_store
from support.servers import RunningServer

T = TypeVar("T")

HOST = "127.0.0.1"
BUCKET_BYTES = 64 * 1024
"""Several buckets even for a tiny model."""
TIMEOUT_S = 15.0

_epochs = itertools.count(1)
_tags = itertools.count()


def load_hf(directory: Path) -> Any:
    """The model as plain transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load_exported(tensors: dict[str, torch.Tensor], like: Path, directory: Path) -> Any:
    """The model ``like`` as plain transformers loads it from exported tensors, all of which it must want and have."""
    directory.mkdir()
    shutil.copy(like / "config.json", directory)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    model, told = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


@torch.no_grad()
def hf_logits(model: Any) -> torch.Tensor:
    """``float32[20, V]``: the model's logits of one fixed sequence."""
    logits: torch.Tensor = model(torch.arange(20)[None] * 7).logits[0]
    return logits


@torch.no_grad()
def hf_logprobs(model: Any, prompt_ids: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """``float32[len(ids)]``: what the model says of each answer token, in one forward over the whole sequence."""
    logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def in_background(function: Callable[[], T]) -> Future[T]:
    """Start a blocking call in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class TrainerSide:
    """Rank 0 towards one server, under an epoch of its own."""

    def __init__(
        self,
        server: RunningServer,
        epoch: int | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.server = server
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.epoch = next(_epochs) if epoch is None else epoch
        self.store, self.port = serve_store(HOST)
        self.tag = ""
        self.pair: PairGroup | None = None
        self._buffers = SnapshotBuffers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def init_body(self, tag: str, **changes: Any) -> dict[str, Any]:
        """Body of ``/init_process_group``."""
        body = {
            "epoch": self.epoch,
            "tag": tag,
            "world_size": 2,
            "master_address": HOST,
            "master_port": self.port,
            "backend": "gloo",
            "timeout_seconds": self.timeout_s,
        }
        return body | changes

    def join(self) -> Self:
        """Meet the server under a fresh tag."""
        self.tag = f"pair-{self.epoch}-{next(_tags)}"
        answer = in_background(lambda: self.server.call("POST", "/init_process_group", self.init_body(self.tag)))
        meeting = in_background(self._meet)
        status, body = answer.result(2 * self.timeout_s)
        assert status == 200, body
        self.pair = meeting.result(self.timeout_s)
        assert body["boot_id"] == self.server.status()["boot_id"]
        return self

    def _meet(self) -> PairGroup:
        return PairGroup.join(
            address=HOST,
            port=self.port,
            tag=self.tag,
            rank=0,
            world_size=2,
            backend="gloo",
            timeout_s=self.timeout_s,
        )

    def leave(self) -> None:
        """Close this side of the pair."""
        if self.pair is not None:
            self.pair.close()
            self.pair = None

    def snapshot(self, model: Any, step: int) -> Snapshot:
        """Version ``(epoch, step)`` of this model's weights."""
        layout = CheckpointLayout(model)
        return self._buffers.capture(Version(self.epoch, step), layout.tensors(layout.named(model)))

    def update_body(self, snapshot: Snapshot, **changes: Any) -> dict[str, Any]:
        """Body of ``/request_weight_update``."""
        request = WeightUpdateRequest(
            epoch=snapshot.version.epoch,
            step=snapshot.version.step,
            tag=self.tag,
            tensors=list(snapshot.specs),
            bucket_bytes=self.bucket_bytes,
            digest=snapshot.digest,
            timeout_seconds=self.timeout_s,
        )
        return request.model_dump() | changes

    def send(self, snapshot: Snapshot, *, first: int = 0, stop: int | None = None) -> None:
        """Broadcast the snapshot's bytes, or only the buckets ``first`` to ``stop``."""
        assert self.pair is not None
        for bucket in plan_buckets(snapshot.specs, self.bucket_bytes)[first:stop]:
            self.pair.broadcast(snapshot.flat[bucket.start : bucket.end])

    def request(self, body: dict[str, Any]) -> tuple[int, Any]:
        """``POST /request_weight_update`` alone."""
        return self.server.call("POST", "/request_weight_update", body)

    def push(self, model: Any, step: int) -> dict[str, Any]:
        """A whole update that must succeed; returns the reply."""
        snapshot = self.snapshot(model, step)
        answer = in_background(lambda: self.request(self.update_body(snapshot)))
        self.send(snapshot)
        status, body = answer.result(self.timeout_s)
        assert status == 200, body
        return body
