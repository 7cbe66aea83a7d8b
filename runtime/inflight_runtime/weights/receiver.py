"""The server's side of an update: receive, verify, and only then hand out.

Nothing here touches the model. A caller commits the returned tensors between two engine steps; when anything raises, it
goes on serving the old weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from inflight_runtime.protocol import TensorSpec, WeightUpdateRequest
from inflight_runtime.weights.digest import digests, manifest_digest, packed_digests
from inflight_runtime.weights.errors import DigestMismatchError, WeightTransferError
from inflight_runtime.weights.memory import HostMemory
from inflight_runtime.weights.packing import Bucket, offsets, plan_buckets, unpack, view
from inflight_runtime.weights.transports.pair import PairGroup

__all__ = ["DigestMismatchError", "PausedBucketReceiver", "StagedReceiver", "WeightTransferError"]


class StagedReceiver:
    """Receives whole updates into scratch memory while the engine goes on generating (gloo).

    The scratch memory is kept between updates of one layout. It is never overwritten while a tensor of an earlier
    update is alive: then a second buffer is taken.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()

    def receive(
        self, pair: PairGroup, request: WeightUpdateRequest, device: torch.device | str = "cpu"
    ) -> list[tuple[str, torch.Tensor]]:
        """Receive all buckets of ``request`` and verify them.

        Args:
            pair: this server's group.
            request: what the trainer announced.
            device: where the tensors shall be; the bytes arrive on the host.

        Returns:
            ``(name, tensor)`` in manifest order; views of one flat buffer.

        Raises:
            DigestMismatchError: a tensor or the manifest is not what was announced; names the first ones.
            WeightTransferError: the trainer is gone or the deadline has passed. The pair is unusable afterwards.
        """
        verify_manifest(request)
        deadline = time.monotonic() + request.timeout_seconds
        flat = self._memory.lease(offsets(request.tensors)[1])
        for bucket in plan_buckets(request.tensors, request.bucket_bytes):
            pair.broadcast(flat[bucket.start : bucket.end], remaining(deadline, request))
        verify_tensors(request.tensors, packed_digests(flat, request.tensors), request)
        return unpack(flat if torch.device(device).type == "cpu" else flat.to(device), request.tensors)


class PausedBucketReceiver:
    """Receives bucket by bucket on the accelerator, so that no second model stands there (nccl).

    The caller has paused the engine and loads each tensor as it comes. A digest that does not match then leaves a mixed
    model: the caller must report itself broken unless nothing was loaded yet. Not proved on a GPU here (see
    :mod:`.transports.pair`); its logic is tested on gloo.
    """

    def receive(
        self, pair: PairGroup, request: WeightUpdateRequest, device: torch.device | str
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the tensors that each bucket completes, verified; they are valid until the next bucket is asked for.

        Raises:
            DigestMismatchError: a tensor or the manifest is not what was announced.
            WeightTransferError: the trainer is gone or the deadline has passed.
        """
        verify_manifest(request)
        deadline = time.monotonic() + request.timeout_seconds
        starts, _ = offsets(request.tensors)
        buckets = plan_buckets(request.tensors, request.bucket_bytes)
        scratch = torch.empty(_largest_group(buckets), dtype=torch.uint8, device=device)
        base = 0
        fresh = True
        for bucket in buckets:
            if fresh:
                base = bucket.start
            pair.broadcast(scratch[bucket.start - base : bucket.end - base], remaining(deadline, request))
            fresh = bucket.completes
            if not fresh:
                continue
            specs = request.tensors[bucket.first : bucket.stop]
            tensors = [
                (spec.name, view(scratch, start - base, spec))
                for spec, start in zip(specs, starts[bucket.first : bucket.stop], strict=True)
            ]
            verify_tensors(specs, digests([tensor for _, tensor in tensors]), request)
            yield tensors


def verify_manifest(request: WeightUpdateRequest) -> None:
    """Check that the request's list of tensors is the one whose digest it carries.

    Raises:
        DigestMismatchError: it is not, or a name stands in it twice.
    """
    names = [spec.name for spec in request.tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DigestMismatchError(f"update {request.epoch}.{request.step}: named twice: {', '.join(twice[:3])}")
    found = manifest_digest(request.tensors)
    if found != request.digest:
        raise DigestMismatchError(
            f"update {request.epoch}.{request.step}: the manifest has digest {found[:16]}..., "
            f"announced was {request.digest[:16]}...; nothing was committed"
        )


def verify_tensors(specs: Sequence[TensorSpec], found: Sequence[str], request: WeightUpdateRequest) -> None:
    """Compare digests of received tensors with the announced ones.

    Raises:
        DigestMismatchError: names the first tensors that differ.
    """
    wrong = [spec.name for spec, value in zip(specs, found, strict=True) if spec.digest != value]
    if wrong:
        raise DigestMismatchError(
            f"update {request.epoch}.{request.step}: {len(wrong)} of {len(specs)} tensors did not arrive as sent "
            f"(first: {', '.join(wrong[:3])})"
        )


def remaining(deadline: float, request: WeightUpdateRequest) -> float:
    """Seconds until ``deadline`` (monotonic).

    Raises:
        WeightTransferError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise WeightTransferError(
            f"update {request.epoch}.{request.step} did not arrive within its {request.timeout_seconds:g} s"
        )
    return left


def _largest_group(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest run of buckets that only its last one completes."""
    largest = start = 0
    fresh = True
    for bucket in buckets:
        if fresh:
            start = bucket.start
        largest = max(largest, bucket.end - start)
        fresh = bucket.completes
    return largest
