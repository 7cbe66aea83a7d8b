"""Names on the wire are those of the HF checkpoint, whatever the trainer has wrapped its model in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch

_LEADING: Final = ("base_model.model.", "module.")
"""What DDP, DeepSpeed and PEFT put in front of every name."""
_ANYWHERE: Final = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""What activation checkpointing, FSDP1 and torch.compile put between any two parts of a name."""
_OUTPUT_EMBEDDING: Final = "lm_head.weight"


def checkpoint_name(name: str) -> str:
    """The name a tensor has in the HF checkpoint: ``name`` without the parts that wrappers added."""
    plain = ".".join(part for part in name.split(".") if part not in _ANYWHERE)
    while (prefix := next((text for text in _LEADING if plain.startswith(text)), None)) is not None:
        plain = plain.removeprefix(prefix)
    return plain


def checkpoint_tensors(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename tensors to checkpoint names and leave the output embedding out where it is the input embedding.

    Args:
        named_tensors: parameters as the trainer names them, in any order; consumed lazily (a gathered tensor may be
            gone after the next one is asked for).
        tied: the model's ``tie_word_embeddings``. A state dict lists the tied weight twice, ``named_parameters`` once.

    Raises:
        ValueError: two tensors end up with one name.
    """
    seen: dict[str, str] = {}
    for name, tensor in named_tensors:
        plain = checkpoint_name(name)
        if tied and (plain == _OUTPUT_EMBEDDING or plain.endswith("." + _OUTPUT_EMBEDDING)):
            continue
        if plain in seen:
            raise ValueError(f"{seen[plain]!r} and {name!r} are both {plain!r} in the checkpoint")
        seen[plain] = name
        yield plain, tensor
