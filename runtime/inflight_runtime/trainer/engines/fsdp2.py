"""Any number of ranks: the model, its gradients and AdamW's state are sharded over all of them (FSDP2, fully_shard).

Master weights are float32. With ``dtype: bfloat16`` the blocks compute in it and gradients are reduced in float32. A
checkpoint has the weights in HF format and the optimizer's state by parameter name in torch's distributed format, so it
can be loaded on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.contract import EngineError, EngineInfo, TokenStats
from inflight_runtime.trainer.engines.many import ManyRanksEngine
from inflight_runtime.trainer.engines.model import find_blocks, recompute
from inflight_runtime.trainer.engines.single import make_optimizer
from inflight_runtime.trainer.engines.state import MOMENTS, SHARDED, read_state, write_state
from inflight_runtime.trainer.manifest import cause
from inflight_runtime.trainer.packing import MicroBatch

BUCKET_BYTES: Final = 256 * 1024 * 1024
"""Gathered weights that are held at once in an export, on each rank."""


class Fsdp2Engine(ManyRanksEngine):
    """Implements :class:`~inflight_runtime.trainer.contract.TrainerEngine`; all its methods are collectives."""

    policy: FSDPModule | None = None

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """See the contract."""
        info = self._load(config, resume, step)
        self.autocast = False  # the mixed-precision policy does it
        self.policy = self._shard(config)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.model, config)
        if resume is not None:
            self._load_optimizer(resume)
        return info

    def forward(self, batch: MicroBatch) -> TokenStats:
        """See the contract."""
        if self.policy is None:
            return super().forward(batch)  # the checks before sharding
        return TokenStats(*cast("nn.Module", self.policy)(batch))

    def backward(self, loss: Tensor, last: bool) -> None:
        """See the contract."""
        # Reduced after every micro-batch: gradients that wait would need the memory of the whole model.
        del last
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]  # FSDP2 averages over ranks

    def save(self, directory: Path) -> None:
        """See the contract; beside it ``directory/optimizer``, to which each rank writes its part.

        Raises:
            RuntimeError: a rank could not write.
        """
        failure: Exception | None = None
        tensors = {}
        for name, tensor in self.export_weights():
            if dist.get_rank() == 0:
                tensors[name] = tensor.cpu().contiguous()
        if dist.get_rank() == 0:
            try:
                self._write_whole(directory, tensors)
            except Exception as error:  # the others are on their way into the next collective: go there first
                failure = error
        try:
            save_sharded(self._optimizer_state(), storage_writer=_Writer(directory / "optimizer"))
        except CheckpointException as error:
            raise RuntimeError(f"the optimizer's state cannot be written: {_reasons(error)}") from error
        if failure is not None:
            raise failure
        if dist.get_rank() == 0:
            _check_parts(directory / "optimizer")

    def close(self) -> None:
        """See the contract."""
        self.optimizer.zero_grad(set_to_none=True)
        super().close()

    def _shard(self, config: TrainerConfig) -> FSDPModule:
        """Shard block by block: besides its shards a rank holds one block whole, or what is outside of blocks."""
        half = config.model.dtype == "bfloat16"
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(config.device, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy(),
        }
        if config.offload_optimizer:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=config.device == "cuda")
        self._send(self.model.buffers())
        for block in find_blocks(self.model):
            self._send(block.parameters())
            if config.activation_checkpointing:
                recompute(block)
            fully_shard(block, **settings)
        self._send(parameter for parameter in self.model.parameters() if not isinstance(parameter, DTensor))
        return fully_shard(_Policy(self.model, super().forward), **settings)

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        bucket: list[tuple[str, Tensor]] = []
        held = 0
        for name, tensor in super()._whole_tensors():
            # Whole buckets are gathered before any of it is used: no collective runs beside what the caller does.
            bucket.append((name, _whole(tensor.to(self.device))))
            held += bucket[-1][1].nbytes
            if held >= BUCKET_BYTES:
                yield from bucket
                bucket, held = [], 0
        yield from bucket

    def _clip_gradients(self) -> Tensor:
        return _whole(super()._clip_gradients())

    def _write_whole(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """What rank 0 alone writes."""
        self._write_model(directory, tensors)
        # No state of a random number generator: nothing here draws from one.
        state = {"format": SHARDED, "step": self.step, "parameters": self._parameter_names()}
        write_state(directory / "trainer.pt", state)

    def _optimizer_state(self) -> dict[str, Any]:
        """``{"<parameter>.<what>": tensor}``, sharded as the parameters are; zeros before the first step."""
        found: dict[str, Any] = {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                found |= {f"{names[id(parameter)]}.{key}": state[key] for key in ("step", *MOMENTS)}
        return found

    def _load_optimizer(self, resume: Path) -> None:
        if read_state(resume / "trainer.pt", SHARDED, self._parameter_names()) is None:
            return
        try:
            load_sharded(self._optimizer_state(), checkpoint_id=resume / "optimizer")  # into the state's own tensors
        except CheckpointException as error:
            raise EngineError(
                f"{resume / 'optimizer'} cannot be loaded, or does not belong to the model beside it: {_reasons(error)}"
            ) from error


class _Policy(nn.Module):
    """The root that FSDP2 sees: whatever computes with parameters happens inside its ``forward``."""

    def __init__(self, model: nn.Module, compute: Any) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None, Tensor]:
        stats = self._compute(batch)
        # A tuple, whose tensors FSDP2 finds: it hangs its backward hooks on them.
        return stats.logprobs, stats.entropy, stats.entropy_sample


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_parts(directory: Path) -> None:
    """Nodes that do not share the directory would be noticed only by a resume, when it is too late."""
    parts = {entry.relative_path for entry in FileSystemReader(directory).read_metadata().storage_data.values()}
    if missing := sorted(part for part in parts if not (directory / part).exists()):
        raise RuntimeError(
            f"{', '.join(missing)} of another rank did not arrive in {directory}: all nodes of a trainer must share "
            "the checkpoint directory"
        )


def _reasons(error: CheckpointException) -> str:
    lines = ((rank, str(failure[0]).partition("\n")[0]) for rank, failure in sorted(error.failures.items()))
    return "; ".join(f"rank {rank}: {line}" for rank, line in lines)


class _Writer(FileSystemWriter):
    """Tells the other ranks what the system said, which is lost where exceptions travel without their causes."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise RuntimeError(cause(error)) from error
