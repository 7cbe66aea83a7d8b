"""One flat buffer for all tensors of a manifest, and its cut into buckets.

Both sides derive the same plan from the same request, so nothing but bytes travels: tensors stand one after the other
in manifest order, each at a multiple of 16 bytes. Buckets hold whole tensors where they fit; a tensor larger than a
bucket has buckets of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from inflight_runtime.protocol import TensorSpec

ALIGNMENT: Final = 16
"""Every tensor starts at a multiple of this many bytes, so that it can be viewed in any dtype."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes ``[start, end)`` of the flat buffer, sent in one piece.

    ``first``..``stop`` (exclusive) are the indices of the tensors with bytes in it; ``completes`` says whether the last
    of them ends here (false only inside a tensor larger than a bucket).
    """

    start: int
    end: int
    first: int
    stop: int
    completes: bool

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a manifest names, for instance ``float32``.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype: expected for instance 'float32' or 'bfloat16'")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest (``float32`` for ``torch.float32``)."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(spec: TensorSpec) -> int:
    """Size of one tensor in bytes, without padding."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def align(position: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Start of each tensor in the flat buffer, and the buffer's whole size (a multiple of the alignment), in bytes."""
    starts = []
    position = 0
    for spec in specs:
        starts.append(position)
        position = align(position + tensor_bytes(spec))
    return starts, position


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cut the flat buffer of these tensors into buckets of at most ``bucket_bytes``.

    Raises:
        ValueError: ``bucket_bytes`` is smaller than the alignment.
    """
    limit = bucket_bytes // ALIGNMENT * ALIGNMENT
    if limit < ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least {ALIGNMENT} bytes")
    starts, total = offsets(specs)
    ends = [*starts[1:], total]
    buckets: list[Bucket] = []
    first = 0
    while first < len(specs):
        start = starts[first]
        stop = first + 1
        if ends[first] - start > limit:
            cuts = [*range(start, ends[first], limit), ends[first]]
            buckets += [Bucket(a, b, first, stop, b == ends[first]) for a, b in itertools.pairwise(cuts)]
        else:
            while stop < len(specs) and ends[stop] - start <= limit:
                stop += 1
            if ends[stop - 1] > start:
                buckets.append(Bucket(start, ends[stop - 1], first, stop, True))
        first = stop
    return buckets


def unpack(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
    """Views of the tensors in a flat buffer; nothing is copied.

    Args:
        flat: ``uint8[N]`` on any device, its memory aligned to 16 bytes, ``N`` at least the size of the layout.
        specs: the manifest.

    Raises:
        ValueError: the buffer is no flat byte buffer or too short.
    """
    starts, total = offsets(specs)
    if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() < total:
        raise ValueError(f"expected a flat uint8 buffer of {total} bytes, got {flat.dtype} of shape {list(flat.shape)}")
    typed: dict[str, torch.Tensor] = {}
    tensors = []
    for start, spec in zip(starts, specs, strict=True):
        if spec.dtype not in typed:
            typed[spec.dtype] = flat[:total].view(torch_dtype(spec.dtype))
        whole = typed[spec.dtype]
        strides = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        tensors.append(
            (spec.name, whole.as_strided(spec.shape, strides, whole.storage_offset() + start // whole.itemsize))
        )
    return tensors


def view(flat: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor of ``spec`` that starts at byte ``start`` of ``flat``, as a view."""
    return flat[start : start + tensor_bytes(spec)].view(torch_dtype(spec.dtype)).view(spec.shape)
