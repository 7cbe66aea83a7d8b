"""Host memory for whole models: reused between versions, never under somebody's feet."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]


class HostMemory:
    """Flat host buffers that are reused, but never while any tensor still looks at them.

    Each lease is a fresh torch storage over pooled memory; torch drops its reference to the memory's handle exactly
    when the last tensor over that storage dies, wherever it is held (Python, a module, C++): nothing is to be released.
    """

    def __init__(self, keep: int = 1) -> None:
        self._keep = keep
        self._pool: list[tuple[_Bytes, weakref.ref[Any]]] = []

    def lease(self, size: int) -> torch.Tensor:
        """An uninitialised ``uint8[size]`` tensor over memory that nothing else uses, aligned to 64 bytes."""
        for index, (memory, handle) in enumerate(self._pool):
            if memory.size == size and handle() is None:
                del self._pool[index]
                return self._hand_out(memory)
        # Memory of another size, and idle memory beyond what is kept, is not worth holding on to.
        self._pool = [entry for entry in self._pool if entry[0].size == size][-self._keep :]
        raw = np.empty(size + 64, dtype=np.uint8)
        start = -raw.ctypes.data % 64
        return self._hand_out(raw[start : start + size])

    def _hand_out(self, memory: _Bytes) -> torch.Tensor:
        handle = memory[:]
        self._pool.append((memory, weakref.ref(handle)))
        self._pool = self._pool[-max(self._keep, 1) :]
        return torch.from_numpy(handle)
