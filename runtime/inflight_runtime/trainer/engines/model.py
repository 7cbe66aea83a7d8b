"""A model as engines get it: loaded whole, or as an outline without weights; and its blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.contract import EngineError

ATTENTION = "sdpa"
"""Takes the masks of shared prefixes."""


def load_model(config: TrainerConfig, resume: Path | None) -> Any:
    """The float32 model on the host, from the config's files or from those of a checkpoint, without dropout.

    Raises:
        EngineError: there is no such model.
    """
    transformers_logging.disable_progress_bar()
    path = model_path(config, resume)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"model {path} cannot be loaded: {error}") from error
    # Dropout would make the policy that is trained another one than the policy that samples.
    return model.eval()


def outline_model(config: TrainerConfig, resume: Path | None) -> Any:
    """What :func:`load_model` gives, on the meta device: modules and shapes, of weights and buffers nothing.

    Raises:
        EngineError: there is no such model.
    """
    path = model_path(config, resume)
    trust = config.model.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                settings, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=trust
            )
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"model {path} cannot be loaded: {error}") from error
    return model.eval()


def model_path(config: TrainerConfig, resume: Path | None) -> str:
    """Directory of the model to start from."""
    return config.model.path if resume is None else str(resume / "model")


def allocate(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give tensors of the meta device memory, with anything in it. What is tied stays tied."""
    for tensor in tensors:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]


def find_blocks(model: Any) -> list[nn.Module]:
    """The model's transformer blocks, in order.

    Raises:
        EngineError: the model does not say which modules they are.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise EngineError(
            f"{type(model).__name__} does not say which of its modules are blocks (_no_split_modules), so they can "
            "be neither sharded nor computed again; use the engine single without spec.trainer.activationCheckpointing"
        )
    return blocks


def recompute(block: Any) -> None:
    """Keep only the inputs of a block in the forward pass, and compute the rest again in the backward pass.

    Not Transformers' own switch, which needs training mode and so dropout. And inside the block's call, not by a module
    around it: names stay as they are, and the hooks by which FSDP2 gathers its weights run once.
    """
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
