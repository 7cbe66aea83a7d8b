"""Which problem comes next: position -> problem index, shuffled anew in each pass over the dataset. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray


class ExhaustedError(Exception):
    """No problem is left to draw."""


class Sampler:
    """Draws problem indices; the position is kept by the caller, so that it can be made durable with the lease.

    What it draws depends on the seed and the positions alone (and on which problems were excluded meanwhile).
    """

    def __init__(self, size: int | None, *, shuffle: bool, seed: int) -> None:
        """Make a sampler over ``size`` problems; ``None``: endless, drawn in order."""
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._pass = -1
        self._order: NDArray[np.int32] | None = None

    def draw(self, position: int, excluded: Collection[int]) -> tuple[int, int]:
        """Draw the problem at ``position`` or the first one after it that is not in ``excluded``.

        Returns:
            The problem index and the position to draw from next.

        Raises:
            ExhaustedError: every problem is excluded.
        """
        if self._size is not None and len(excluded) >= self._size:
            raise ExhaustedError(f"all {self._size} problems are excluded")
        while True:
            index = self._at(position)
            position += 1
            if index not in excluded:
                return index, position

    def _at(self, position: int) -> int:
        if self._size is None:
            return position
        if not self._shuffle:
            return position % self._size
        which, offset = divmod(position, self._size)
        if which != self._pass or self._order is None:
            # int32 halves the memory of a large dataset's order.
            order = np.arange(self._size, dtype=np.int32)
            np.random.default_rng([self._seed, which]).shuffle(order)
            self._pass, self._order = which, order
        return int(self._order[offset])
