"""What engines of several ranks have in common: rank 0 alone loads the model and checks it, whole, on the host.

The others make its outline on the meta device. Their parts of the weights come from rank 0, so a machine with many
ranks holds the model once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.contract import EngineError, EngineInfo
from inflight_runtime.trainer.engines.model import allocate, load_model, model_path, outline_model
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.ranks import fail_together, join_group

LOAD_DEADLINE_S: Final = 3600.0
"""For rank 0 to load and check the model while the others wait; a rank that dies is noticed at once."""


class ManyRanksEngine(SingleEngine):
    """Base of the engines of several ranks."""

    def _load(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """Join the group, and load the model on rank 0 and its outline on the others. A collective.

        Raises:
            EngineError: the model cannot be loaded or trained, on whichever rank.
            RankError: another rank failed in another way.
        """
        self._owns_group = not dist.is_initialized()
        device = join_group(config.device)
        self._begin(config, torch.device("cpu"), step)
        self._leads = dist.get_rank() == 0
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOAD_DEADLINE_S))
        failure: Exception | None = None
        try:
            self.model = load_model(config, resume) if self._leads else outline_model(config, resume)
            info = self._describe_model()
            if self._leads:
                self._check_model(model_path(config, resume))
        except Exception as error:  # the others must hear of it
            failure = error
        try:
            fail_together(failure, group)
        finally:
            dist.destroy_process_group(group)
        self._compare_outlines()
        self.device = device
        return info

    def _compare_outlines(self) -> None:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        outline = json.dumps([(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in named])
        mine = torch.frombuffer(bytearray(hashlib.sha256(outline.encode()).digest()), dtype=torch.uint8)
        outlines = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(outlines, mine)
        for rank, other in enumerate(outlines):
            if not torch.equal(other, outlines[0]):
                raise EngineError(
                    f"model {self.config.model.path}: rank {rank} makes other weights of its config.json than rank 0 "
                    "has loaded; give all ranks the same files, and let tie_word_embeddings say what the weights do"
                )

    def _send(self, tensors: Iterable[Tensor]) -> None:
        """Bring tensors to the engine's device on all ranks, with rank 0's values. A collective."""
        for tensor in tensors:
            if self._leads:
                tensor.data = tensor.data.to(self.device).contiguous()
            else:
                allocate([tensor], self.device)
            dist.broadcast(tensor.detach().view(-1).view(torch.uint8), 0)

    def close(self) -> None:
        """See the contract."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
