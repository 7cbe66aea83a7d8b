"""From a model's tensors to those of its checkpoint: transformers renames and fuses some of them when it loads a model.

The experts of Qwen3-MoE or Mixtral, three matrices each on disk, are two tensors of all experts in memory. What
transformers did is undone by transformers (what ``save_pretrained`` does), one tensor at a time: never is more held
than one. Whether that gives the checkpoint's names and shapes is found out before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from inflight_runtime.inference.checkpoint_names import UnknownCheckpointError, read_expected_tensors
from inflight_runtime.protocol import TensorSpec
from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.weights.names import checkpoint_name, checkpoint_tensors
from inflight_runtime.weights.packing import dtype_name


class CheckpointLayout:
    """How the tensors of a model that was loaded from a checkpoint lie in it."""

    def __init__(self, model: Any) -> None:
        """Find out what becomes of each tensor; only names and shapes are looked at.

        Args:
            model: as transformers loaded it, nothing wrapped or sharded yet; on any device.

        Raises:
            EngineError: a tensor of the checkpoint is made of several of the model's.
        """
        self._model = model
        self.tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        """Whether the output head is the input embedding, which a checkpoint holds once."""
        self.buffers = _persistent_buffers(model)
        """Names of the buffers that belong to a checkpoint."""
        blank = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in checkpoint_tensors(self.named(model), tied=self.tied)
        }
        self._converted: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._blank: dict[str, Tensor] = {}
        for name, tensor in blank.items():
            parts = self._revert(name, tensor)
            (first, value), *others = parts.items()
            if others or value is not tensor:
                self._converted.add(name)
            else:
                self._renamed[name] = first
            if shared := parts.keys() & self._blank:
                raise EngineError(
                    f"{_kind(model)} cannot be exported: transformers makes several tensors of the checkpoint's "
                    f"{min(shared)} when it loads it, and that cannot be undone tensor by tensor; use a model of "
                    "another architecture"
                )
            self._blank |= parts

    def named(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """The tensors of ``model`` that a checkpoint holds, under the model's own names."""
        yield from model.named_parameters()
        for name, buffer in model.named_buffers():
            if checkpoint_name(name) in self.buffers:
                yield name, buffer

    def check(self, directory: Path) -> None:
        """Compare with the files of the checkpoint that servers have loaded; only headers are read.

        Raises:
            EngineError: a name or a shape is another one.
        """
        try:
            expected = read_expected_tensors(directory)
        except UnknownCheckpointError as error:
            raise EngineError(f"model {directory} cannot be exported: {error}") from error
        problem = expected.problem(
            TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), digest="")
            for name, tensor in self._blank.items()
        )
        if problem:
            raise EngineError(
                f"model {directory} ({_kind(self._model)}) would not be exported as it lies in its files: {problem}. "
                "transformers loads it in another layout and does not undo that, or the files hold what it does not "
                "load; write the model anew with transformers' save_pretrained, or use another one"
            )

    def tensors(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Under their checkpoint names, the fused ones in their parts (views where that is possible).

        Args:
            named_tensors: whole tensors of the model, wrapped names or not; consumed lazily, each valid until the next
                one is asked for.
        """
        for name, tensor in checkpoint_tensors(named_tensors, tied=self.tied):
            if name in self._converted:
                yield from self._revert(name, tensor).items()
            else:
                yield self._renamed[name], tensor

    def _revert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return parts


def _persistent_buffers(model: Any) -> frozenset[str]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(model.state_dict().keys() - parameters)


def _kind(model: Any) -> str:
    return type(model).__name__
