"""DeepSpeed ZeRO: optimizer states (stage 1), gradients (2) and weights (3) are split over the ranks.

Weights are float32 on every stage; with ``dtype: bfloat16`` the model computes under autocast, as under ``single``.
DeepSpeed averages gradients over ranks and the contract wants their sum, so the loss is multiplied by their number.
``trainer.pt`` is that of ``single``, each moment in the shape of its parameter: a checkpoint goes on with another
number of ranks, on another stage and under ``single``. Nothing is compiled: the collectives and AdamW are torch's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.contract import EngineInfo, StepStats, TokenStats
from inflight_runtime.trainer.engines.many import ManyRanksEngine
from inflight_runtime.trainer.engines.model import allocate, find_blocks, recompute
from inflight_runtime.trainer.engines.single import make_optimizer
from inflight_runtime.trainer.engines.state import MOMENTS, Moments
from inflight_runtime.trainer.logprobs import Head
from inflight_runtime.trainer.packing import MicroBatch
from inflight_runtime.trainer.schedule import learning_rate

BUCKET_ELEMENTS: Final = 1 << 26
"""Elements that are reduced at once, or gathered at once for an export (256 MiB of float32)."""
PERSISTENT_ELEMENTS = 100_000
"""Parameters below this size stay whole on every rank on stage 3 (norms, biases): gathering them costs more."""
WHOLE_MODEL_SPLIT: Final = 3
"""The stage on which weights are split, too."""


class DeepSpeedEngine(ManyRanksEngine):
    """Implements :class:`~inflight_runtime.trainer.contract.TrainerEngine`; all its methods are collectives."""

    wrapped: Any = None
    """``deepspeed.DeepSpeedEngine``, once the model has passed the checks of ``single``."""
    optimizer: HeldAdamW

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """See the contract."""
        os.environ.setdefault("DS_ACCELERATOR", config.device)  # before transformers imports deepspeed
        info = self._load(config, resume, step)
        self._send(self.model.buffers())
        # Memory that nothing is written to until DeepSpeed, parameter by parameter, sends rank 0's and splits them.
        allocate(self.model.parameters(), torch.device("cpu"))
        if config.activation_checkpointing:
            for block in find_blocks(self.model):
                recompute(block)
        self._pending = False
        self._wrap()
        if resume is not None:
            self._load_state(resume / "trainer.pt")
        return info

    def forward(self, batch: MicroBatch) -> TokenStats:
        """See the contract."""
        return super().forward(batch) if self.wrapped is None else TokenStats(*self.wrapped(batch))

    def backward(self, loss: Tensor, last: bool) -> None:
        """See the contract."""
        self.wrapped.set_gradient_accumulation_boundary(last)
        self.wrapped.backward(loss * dist.get_world_size())  # it averages over ranks
        self._pending = True

    def optimizer_step(self, *, skip: bool = False) -> StepStats:
        """See the contract."""
        self.step += 1
        rate = learning_rate(self.config.optimizer, self.step, self.config.steps)
        if not self._pending:  # no micro-batch in this step
            return StepStats(grad_norm=0.0, learning_rate=rate, applied=False)
        self._pending = False
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.held = skip
        self.wrapped.step()  # it passes over gradients that are not finite, on all ranks alike
        return StepStats(
            grad_norm=float(self.wrapped.get_global_grad_norm()),
            learning_rate=rate,
            applied=self.wrapped.was_step_applied() and not skip,
        )

    def save(self, directory: Path) -> None:
        """See the contract. Rank 0 gathers all in its host memory and writes; the others only take part."""
        leads = dist.get_rank() == 0
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.export_weights():
            if leads:
                tensors[name] = tensor.to("cpu", copy=True).contiguous()
        moments = self._moments(keep=leads)
        if leads:
            self._write(directory, tensors, moments)

    def close(self) -> None:
        """See the contract."""
        if self.wrapped is not None:
            self.wrapped.destroy()
        super().close()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed  # noqa: PLC0415  it takes seconds
        import deepspeed.ops  # noqa: PLC0415

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # "an untested optimizer": torch's AdamW
        # It would compile an all-reduce through shared memory, which takes a C++ compiler and 20 s.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        head = _Head(self.model.get_output_embeddings(), super()._token_stats)
        self.optimizer = HeldAdamW(make_optimizer(self.model, self.config).param_groups)
        self._names = super()._parameter_names()
        self.wrapped, *_ = deepspeed.initialize(
            model=_Policy(self.model, head, super().forward).eval(),
            optimizer=self.optimizer,
            config=self._settings(),
        )
        self.head = head
        # Made here as AdamW makes them in its first step: moments are loaded into them, and a first step may be held.
        for partition in self._partitions():
            zeros = {name: torch.zeros_like(partition) for name in MOMENTS}
            self.optimizer.state[partition] = {"step": torch.zeros((), device=partition.device)} | zeros
        if self.config.zero_stage != WHOLE_MODEL_SPLIT:
            self.wrapped.optimizer._lazy_init_hp_params_optimizer_state()  # else it would do so after that step

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration. The sizes of batches only feed its statistics."""
        zero: dict[str, Any] = {
            "stage": self.config.zero_stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        }
        if self.config.zero_stage == WHOLE_MODEL_SPLIT:
            zero["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
        if self.config.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.optimizer.grad_clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    def _token_stats(
        self, head: Head, hidden: Tensor, token_sources: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if self.wrapped is None:
            return super()._token_stats(head, hidden, token_sources, targets)
        stats: tuple[Tensor, Tensor | None, Tensor] = self.head(hidden, token_sources, targets)
        return stats

    def _parameter_names(self) -> list[str]:
        return self._names

    def _partitions(self) -> list[Tensor]:
        """This rank's parts of the float32 weights, flat: the parameters that the optimizer sees."""
        zero = self.wrapped.optimizer
        parts: list[Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self.config.zero_stage == WHOLE_MODEL_SPLIT
            else zero.single_partition_of_fp32_groups
        )
        return parts

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.config.zero_stage != WHOLE_MODEL_SPLIT:
            yield from super()._whole_tensors()
            return
        from deepspeed.runtime.zero import GatheredParameters  # noqa: PLC0415

        for bucket in _buckets(self.layout.named(self.model)):
            with GatheredParameters([tensor for _, tensor in bucket]):  # it passes over buffers, which are whole
                for name, tensor in bucket:
                    yield name, tensor.detach()

    def _moments(self, *, keep: bool) -> dict[int, dict[str, Tensor]]:
        """AdamW's state as ``single`` has it, gathered moment by moment; with ``keep`` it is returned."""
        from deepspeed.utils import safe_get_full_optimizer_state  # noqa: PLC0415

        step = self.optimizer.state[self._partitions()[0]]["step"].cpu()
        parameters = dict(self.model.named_parameters())
        moments: dict[int, dict[str, Tensor]] = {}
        for index, name in enumerate(self._names):
            for moment in MOMENTS:
                whole = safe_get_full_optimizer_state(parameters[name], moment)
                if keep:
                    # A clone: AdamW counts the steps of each parameter, in place.
                    moments.setdefault(index, {"step": step.clone()})[moment] = whole.to("cpu", copy=True)
        return moments

    def _parameter_shapes(self) -> dict[str, Sequence[int]]:
        parameters = dict(self.model.named_parameters())
        # On stage 3 a parameter is a placeholder, which knows its shape.
        return {name: getattr(parameters[name], "ds_shape", parameters[name].shape) for name in self._names}

    def _load_moments(self, moments: Moments) -> None:
        from deepspeed.utils import (  # noqa: PLC0415
            safe_set_full_optimizer_state,
            safe_set_local_optimizer_state,
        )

        if not moments:  # saved before the first step
            return
        for partition in self._partitions():
            # One count for all here. Under single a parameter that had no gradient in a step has a smaller one.
            self.optimizer.state[partition]["step"].copy_(max(state["step"] for state in moments.values()))
        parameters = dict(self.model.named_parameters())
        for index, name in enumerate(self._names):
            parameter: Any = parameters[name]
            for moment in MOMENTS:
                if index not in moments:
                    continue
                value = moments[index][moment]
                if self.config.zero_stage == WHOLE_MODEL_SPLIT:
                    size = parameter.ds_tensor.numel()
                    start = size * dist.get_rank()
                    part = value.flatten()[start : start + size]
                    # The last rank's part is padded.
                    part = functional.pad(part, (0, size - part.numel()))
                    safe_set_local_optimizer_state(parameter, part, moment)
                else:
                    safe_set_full_optimizer_state(parameter, value, moment)


class HeldAdamW(torch.optim.AdamW):
    """AdamW whose steps do nothing while ``held``: DeepSpeed then clears the gradients and changes nothing."""

    held = False

    def step(self, closure: Any = None) -> Any:
        """One step, or none."""
        return None if self.held else super().step(closure)


class _Policy(nn.Module):
    """The module that DeepSpeed sees: whatever computes with parameters happens inside its ``forward``."""

    def __init__(self, model: nn.Module, head: nn.Module, compute: Callable[[MicroBatch], TokenStats]) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self._compute = compute

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None, Tensor]:
        stats = self._compute(batch)
        # A tuple, whose tensors DeepSpeed finds: it hangs its backward hooks on them.
        return stats.logprobs, stats.entropy, stats.entropy_sample


class _Head(nn.Module):
    """The model's head as one module with everything that is computed from its logits.

    The head is applied to chunks, whose number depends on the data. Stage 3 gathers a module's weights at each call of
    it, on all ranks: calls that differ in number would leave a rank waiting. This module is called once.
    """

    def __init__(self, head: nn.Linear, compute: Callable[..., tuple[Tensor, Tensor | None, Tensor]]) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self._compute = compute

    def forward(self, hidden: Tensor, token_sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return self._compute(self._logits, hidden, token_sources, targets)

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


def _buckets(named: Iterator[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Tensors in runs of up to :data:`BUCKET_ELEMENTS`; a larger one is alone."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in named:
        # A parameter's numel() is that of this rank's placeholder.
        elements = getattr(tensor, "ds_numel", tensor.numel())
        if bucket and size + elements > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += elements
    if bucket:
        yield bucket
