"""A commit of a millisecond on CPU: new weights are fused and repacked beside the running engine, then swapped in.

vLLM's layerwise reload does that work while the engine stands still (30 ms for a tiny model, 0.3 s for one of 538 MB).
Which checkpoint tensor belongs to which parameter is read off the names and the model's own ``packed_modules_mapping``,
and is believed only after a comparison with what the reload made of the same tensors. Whatever does not fit (quantised,
compiled, sharded or renamed models) stays with the reload.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

logger = logging.getLogger(__name__)

PLAIN_PRODUCT_UP_TO: Final = 2**17
"""Elements of a matrix up to which torch's own product is used: oneDNN compiles a kernel of 1 ms for every batch size,
and a repacked matrix of that size saves less than that before the next version replaces it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of one layer: rows of the sources, one after the other, the rest of it zero.

    Attributes:
        layer: the layer.
        name: the parameter's name in it.
        sources: checkpoint tensors.
        shape: of the parameter before it was repacked.
        dtype: of the parameter.
    """

    layer: Any
    name: str
    sources: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def multiplies(self) -> bool:
        """Whether the layer keeps a matrix product over (a repacked copy of) this parameter."""
        return self.name == "weight" and hasattr(self.layer, "cpu_linear")

    @property
    def plain(self) -> bool:
        """Whether that product is torch's own."""
        return self.dtype == torch.float32 and self.shape.numel() <= PLAIN_PRODUCT_UP_TO

    def gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameter's new value, in memory of its own."""
        value = torch.empty(self.shape, dtype=self.dtype)
        row = 0
        for source in self.sources:
            part = tensors[source]
            value[row : row + len(part)].copy_(part)
            row += len(part)
        value[row:].zero_()
        return value


@dataclass(frozen=True, slots=True)
class Prepared:
    """New values of a whole model: ``(slot, value, matrix product over the repacked value or None)``."""

    values: list[tuple[Slot, Tensor, Any]]


class SwapPlan:
    """Where every tensor of a snapshot goes in a model; built by :func:`plan_swap`."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    @torch.no_grad()
    def prepare(self, tensors: Mapping[str, Tensor]) -> Prepared:
        """Fuse and repack; touches nothing of the model, so it may run beside it."""
        tables: dict[tuple[str, ...], Tensor] = {}
        values: list[tuple[Slot, Tensor, Any]] = []
        for slot in self._slots:
            # A tied head and its embedding share their memory.
            value = tables[slot.sources] = tables[slot.sources] if slot.sources in tables else slot.gather(tensors)
            product = None
            if slot.multiplies and slot.plain:
                product = F.linear
            elif slot.multiplies:
                double: Any = nn.Module()
                double.weight = nn.Parameter(value, requires_grad=False)
                dispatch_cpu_unquantized_gemm(double, remove_weight=slot.layer.weight.numel() == 0)
                value, product = double.weight.data, double.cpu_linear
            values.append((slot, value, product))
        return Prepared(values)

    @torch.no_grad()
    def apply(self, prepared: Prepared) -> None:
        """Swap the new values in; the engine must stand still."""
        for slot, value, product in prepared.values:
            getattr(slot.layer, slot.name).data = value
            if product is not None:
                slot.layer.cpu_linear = product

    @torch.no_grad()
    def agrees(self, prepared: Prepared) -> bool:
        """Whether the model, reloaded by vLLM from the same tensors, holds exactly the prepared values."""
        generator = torch.Generator().manual_seed(0)
        for slot, value, product in prepared.values:
            now = getattr(slot.layer, slot.name)
            if slot.multiplies and slot.plain:
                x = torch.randn(4, slot.shape[1], generator=generator)
                if not torch.allclose(slot.layer.cpu_linear(x, now, None), product(x, value, None), 1e-4, 1e-5):
                    logger.warning("swap plan: the product with %s differs", slot.sources)
                    return False
                continue
            if now.shape != value.shape or now.dtype != value.dtype or not torch.equal(now.data, value):
                logger.warning("swap plan: %s does not come from %s", slot.name, slot.sources)
                return False
            if product is not None:
                x = torch.randn(4, slot.shape[1], generator=generator).to(slot.dtype)
                if not torch.equal(slot.layer.cpu_linear(x, now, None), product(x, value, None)):
                    logger.warning("swap plan: the product with %s differs", slot.sources)
                    return False
        return True


def plan_swap(model: nn.Module, tensors: Mapping[str, Tensor]) -> SwapPlan | None:
    """Find the place of every tensor, or ``None`` when one of them, or one parameter, has no plain place.

    Call it on a model that vLLM has just reloaded from the same tensors; the plan has been compared with the result.
    """
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tied = _tied_sources(model, tensors)
    slots = []
    for path, layer in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        recorded = get_layerwise_info(layer).restore_metadata[0]
        for name, parameter in layer.named_parameters(recurse=False):
            original = recorded.get(name, parameter)  # what repacking leaves alone is not recorded
            whole = f"{path}.{name}"
            parts = [f"{parent}.{part}.{name}" for part in packed.get(leaf, ())]
            # A tied head is the embedding's, whether or not the snapshot holds it twice.
            sources = tied.get(id(parameter)) or ((whole,) if whole in tensors else tuple(parts))
            if not _fits(layer, original, [tensors.get(source) for source in sources]):
                logger.info("no swap plan: %s has no plain source; vLLM's reload is used", whole)
                return None
            slots.append(Slot(layer, name, sources, original.shape, original.dtype))
    used = {source for slot in slots for source in slot.sources}
    if spare := [name for name in tensors if name not in used and name != "lm_head.weight"]:
        logger.info("no swap plan: %s has no place; vLLM's reload is used", spare[0])
        return None
    plan = SwapPlan(slots)
    if not plan.agrees(plan.prepare(tensors)):
        return None
    logger.info("swap plan: the %d parameters of later updates are swapped in", len(slots))
    return plan


def _tied_sources(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[int, tuple[str, ...]]:
    """Source of an embedding's parameter by its id, for the output head that shares it."""
    found: dict[int, tuple[str, ...]] = {}
    for path, layer in model.named_modules():
        source = f"{path}.weight"
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead) and source in tensors:
            found[id(layer.weight)] = (source,)
    return found


def _fits(layer: nn.Module, original: Tensor, sources: list[Tensor | None]) -> bool:
    """Whether the sources' rows fill the parameter (an embedding is padded to a round number of rows)."""
    rows = 0
    for source in sources:
        if source is None or source.shape[1:] != original.shape[1:]:
            return False
        rows += source.shape[0]
    padded = isinstance(layer, VocabParallelEmbedding)
    return 0 < rows <= original.shape[0] and (padded or rows == original.shape[0])
