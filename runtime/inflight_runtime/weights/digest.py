"""Digests of tensors and manifests: what makes "wrong weights under a right version" impossible to serve unnoticed.

A tensor's digest is a position-weighted sum of its raw bytes, modulo 2^64::

    digest = sum over words i of  word[i] * block_weight[i // BLOCK] * weight[i % BLOCK]   (mod 2^64)

Words are the tensor's bytes read as int32 (elements of 4 bytes and more), int16 (2 bytes) or uint8 (1 byte). All
weights are odd, hence invertible modulo 2^64: no single changed word can go unnoticed, whatever it was changed to. The
weights are mixed from the position (SplitMix64), so values that swapped places, or two flipped signs, change the sum
too, but for a chance of about 2^-32. It guards against lost, torn and misplaced bytes, not against a forger: that is
what the job's token is for.

It runs in torch where the bytes are (CPU or GPU), in small scratch memory; its value does not depend on the chunking.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from inflight_runtime.protocol import TensorSpec
from inflight_runtime.weights.packing import align, torch_dtype, unpack

BLOCK: Final = 1 << 17
"""Words that share one block weight; part of the digest's definition."""
_ROWS_PER_KERNEL: Final = 32
"""Blocks summed at once on an accelerator: 32 * BLOCK * 8 bytes = 32 MiB of scratch memory."""
_SMALL: Final = 1 << 13
"""Tensors of up to this many words are summed together on the CPU."""
_RUN: Final = 1 << 18
"""Most words summed together."""
_MASK: Final = (1 << 64) - 1
_WORD: Final = {1: torch.uint8, 2: torch.int16}
_NUMPY_WORD: Final = {1: np.uint8, 2: np.int16}
_BLOCK_SALT: Final = 1 << 40
"""Separates the positions of block weights from those of word weights."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor's bytes.

    Args:
        tensor: any shape, dtype and device; made contiguous if it is not.

    Returns:
        16 hexadecimal digits. Shape and dtype are not part of it (they stand in the manifest).
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Digests of several tensors, in order; accelerators are asked for their results once, at the end."""
    sums = [_cpu_sum(_words(t)) if t.device.type == "cpu" else _device_sum(_words(t)) for t in tensors]
    pending = [value for value in sums if isinstance(value, torch.Tensor)]
    fetched = iter(torch.stack([value.to(pending[0].device) for value in pending]).tolist() if pending else ())
    return [f"{(next(fetched) if isinstance(value, torch.Tensor) else value) & _MASK:016x}" for value in sums]


def packed_digests(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[str]:
    """Digests of the tensors of a flat buffer (:mod:`.packing`), equal to :func:`digests` of its views.

    On the CPU, neighbouring small tensors are summed by one multiplication and one segmented sum: a handful of calls
    instead of eight per tensor. Beside a busy engine thread each call may have to wait for the interpreter lock.

    Args:
        flat: ``uint8[N]``.
        specs: the manifest; digests in it are ignored.
    """
    if flat.device.type != "cpu":
        return digests([tensor for _, tensor in unpack(flat, specs)])
    data = flat.numpy()
    result = [0] * len(specs)
    for run in _plan(tuple((spec.dtype, math.prod(spec.shape)) for spec in specs)):
        words = data[run.start : run.end].view(run.word)
        if run.weights is None:
            result[run.indices[0]] = _cpu_sum(torch.from_numpy(words))
        else:
            sums = np.add.reduceat(np.multiply(words, run.weights, dtype=np.int64), run.starts)
            for index, value in zip(run.indices, sums.tolist(), strict=True):
                result[index] = value * _block_weight(0)
    return [f"{value & _MASK:016x}" for value in result]


def manifest_digest(tensors: Iterable[TensorSpec]) -> str:
    """SHA-256, in hex, of the canonical JSON of names, dtypes, shapes and tensor digests, in order."""
    rows = [[spec.name, spec.dtype, list(spec.shape), spec.digest] for spec in tensors]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Bytes ``[start, end)`` of a flat buffer that are summed together: one large tensor or several small ones."""

    start: int
    end: int
    word: np.dtype[Any]
    indices: tuple[int, ...]
    starts: NDArray[np.int64]
    weights: NDArray[np.int64] | None
    """One per word, 0 on padding; ``None`` for a large tensor."""


@lru_cache(maxsize=4)
def _plan(layout: tuple[tuple[str, int], ...]) -> list[_Run]:
    runs: list[_Run] = []
    pieces: list[tuple[int, int, int]] = []  # index, first byte, words
    weights = _weights(torch.device("cpu")).numpy()
    word: np.dtype[Any] = np.dtype(np.uint8)

    def close() -> None:
        if not pieces:
            return
        first, last = pieces[0][1], pieces[-1][1] + pieces[-1][2] * word.itemsize
        spread = np.zeros((last - first) // word.itemsize, dtype=np.int64)
        starts = np.array([(byte - first) // word.itemsize for _, byte, _ in pieces])
        for start, (_, _, words) in zip(starts, pieces, strict=True):
            spread[start : start + words] = weights[:words]
        runs.append(_Run(first, last, word, tuple(piece[0] for piece in pieces), starts, spread))
        pieces.clear()

    position = 0
    for index, (dtype, count) in enumerate(layout):
        itemsize = torch_dtype(dtype).itemsize
        kind: np.dtype[Any] = np.dtype(_NUMPY_WORD.get(itemsize, np.int32))
        size = count * itemsize
        words = size // kind.itemsize
        if pieces and (kind != word or words > _SMALL or position + size - pieces[0][1] > _RUN * kind.itemsize):
            close()
        if words > _SMALL:
            runs.append(_Run(position, position + size, kind, (index,), np.zeros(1, dtype=np.int64), None))
        elif words:
            word = kind
            pieces.append((index, position, words))
        position = align(position + size)
    close()
    return runs


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_WORD.get(flat.element_size(), torch.int32))


def _cpu_sum(words: torch.Tensor) -> int:
    count = words.numel()
    weights = _weights(torch.device("cpu"))
    if count <= BLOCK:
        return int(torch.dot(words.to(torch.int64), weights[:count]).item()) * _block_weight(0)
    scratch = torch.empty(BLOCK, dtype=torch.int64)
    total = 0
    for block, part in enumerate(torch.split(words, BLOCK)):
        size = part.numel()
        wide = scratch[:size]
        wide.copy_(part)
        total += int(torch.dot(wide, weights[:size]).item()) * _block_weight(block)
    return total & _MASK


def _device_sum(words: torch.Tensor) -> torch.Tensor:
    """The same sum as 0-d int64 on the tensor's device (there, ``dot`` knows no integers)."""
    weights = _weights(words.device)
    whole = words.numel() // BLOCK
    sums = [
        (rows * weights).sum(dim=1)
        for rows in torch.split(words[: whole * BLOCK].view(whole, BLOCK), _ROWS_PER_KERNEL)
        if rows.numel()
    ]
    rest = words[whole * BLOCK :]
    sums.append((rest * weights[: rest.numel()]).sum(dtype=torch.int64).view(1))
    blocks = torch.cat(sums)
    return (blocks * _block_weights(blocks.numel(), words.device)).sum()


def _mix(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014: Fast splittable pseudorandom number generators), made odd."""
    z = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_mix(np.arange(BLOCK, dtype=np.uint64)).view(np.int64)).to(device)


@lru_cache(maxsize=1 << 16)
def _block_weight(block: int) -> int:
    return int(_mix(np.array([_BLOCK_SALT + block], dtype=np.uint64))[0])


def _block_weights(count: int, device: torch.device) -> torch.Tensor:
    mixed = _mix(np.arange(_BLOCK_SALT, _BLOCK_SALT + count, dtype=np.uint64))
    return torch.from_numpy(mixed.view(np.int64)).to(device)
