"""An immutable copy of the weights on the host: training goes on while it is being sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from inflight_runtime.protocol import TensorSpec
from inflight_runtime.types import Version
from inflight_runtime.weights.digest import manifest_digest, packed_digests
from inflight_runtime.weights.memory import HostMemory
from inflight_runtime.weights.packing import align, dtype_name, torch_dtype, unpack


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Version ``version`` of the weights, packed.

    Attributes:
        specs: the manifest, in packing order.
        flat: ``uint8[N]`` on the CPU; nobody writes to it as long as this object or a view of it lives.
        digest: of the manifest.
    """

    version: Version
    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor
    digest: str

    @property
    def nbytes(self) -> int:
        """Size of what is sent."""
        return self.flat.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as views."""
        return dict(unpack(self.flat, self.specs))


class SnapshotBuffers:
    """Takes snapshots into reused memory: v+1 is filled while v is being sent.

    Two buffers are kept. A further one is taken only while both are in use (a slow server may still be reading an old
    version), so there are never more than the number of servers plus two.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(keep=2)
        self._size = 0

    def capture(
        self,
        version: Version,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | str | None = None,
    ) -> Snapshot:
        """Copy the weights.

        Args:
            version: which version they are.
            named_tensors: in checkpoint names (:mod:`.names`), on any device, each read before the next is asked for.
            dtype: what floating-point tensors are converted to on the way; ``None`` keeps each one's own.

        Raises:
            ValueError: no tensors, or one name twice.
        """
        wanted = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        flat = self._memory.lease(self._size)
        layout: dict[str, tuple[str, list[int]]] = {}
        position = 0
        for name, tensor in named_tensors:
            if name in layout:
                raise ValueError(f"snapshot {version}: two tensors are named {name!r}")
            target = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
            end = position + tensor.numel() * target.itemsize
            if align(end) > flat.numel():
                # Only the first snapshot of a layout grows; the next ones start at its size.
                flat = self._grown(flat, position, align(end))
            flat[position:end].view(target).copy_(tensor.detach().reshape(-1))
            if end % 16:
                flat[end : align(end)].zero_()
            layout[name] = (dtype_name(target), list(tensor.shape))
            position = align(end)
        if not layout:
            raise ValueError(f"snapshot {version}: there are no tensors")
        self._size = position
        flat = flat[:position]
        blank = [TensorSpec(name=name, dtype=kind, shape=shape, digest="") for name, (kind, shape) in layout.items()]
        specs = tuple(
            spec.model_copy(update={"digest": digest})
            for spec, digest in zip(blank, packed_digests(flat, blank), strict=True)
        )
        return Snapshot(version, specs, flat, manifest_digest(specs))

    def _grown(self, flat: torch.Tensor, used: int, needed: int) -> torch.Tensor:
        larger = self._memory.lease(max(needed, 2 * flat.numel()))
        larger[:used].copy_(flat[:used])
        return larger
