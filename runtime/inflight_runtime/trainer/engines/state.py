"""``trainer.pt``: the checks before an optimizer takes over what a checkpoint has for it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from inflight_runtime.trainer.contract import EngineError

logger = logging.getLogger(__name__)

WHOLE: Final = 1
"""AdamW's moments are in ``trainer.pt``, each in the shape of its parameter: ``single`` and ``deepspeed``."""
SHARDED: Final = "fsdp2-1"
"""They are beside it in ``optimizer/``, in torch's distributed format: ``fsdp2``."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
Moments = Mapping[int, Mapping[str, Tensor]]
"""AdamW's state, each parameter's under its number in the optimizer."""


def read_state(path: Path, own: int | str, parameters: Sequence[str]) -> dict[str, Any] | None:
    """Read ``trainer.pt``; ``None`` when an engine with another layout wrote it, whose weights alone can be used.

    Args:
        path: the file.
        own: the caller's layout.
        parameters: names of the model's parameters, in the optimizer's order.

    Raises:
        EngineError: it cannot be read, or is not of this model.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found, names, step = state["format"], list(state["parameters"]), int(state["step"])
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        problem = f"{error}".partition("\n")[0]
        raise EngineError(
            f"{path} cannot be read as an optimizer's state: {type(error).__name__}: {problem}"
        ) from error
    if found not in (WHOLE, SHARDED):
        raise EngineError(f"{path} has format {found!r}, which this version does not know; go on with the one it is of")
    leads = not dist.is_initialized() or dist.get_rank() == 0
    if found != own:
        writers = "'fsdp2'" if found == SHARDED else "'single' or 'deepspeed'"
        if leads:
            logger.warning(
                "%s was written by the engine %s: the weights are taken over and the optimizer begins afresh",
                path,
                writers,
            )
        return None
    if names != list(parameters):
        raise EngineError(
            f"{path} is not of this model: its optimizer state cannot be used; start from the weights alone by giving "
            "the checkpoint's model directory as the job's model"
        )
    if leads:
        logger.info("%s: the weights and the optimizer go on from step %d", path, step)
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``trainer.pt``.

    Raises:
        OSError, RuntimeError: it could not be written.
    """
    with path.open("wb") as file:  # given a path, torch does not say what the system said
        torch.save(state, file)


def check_moments(moments: Any, shapes: Mapping[str, Sequence[int]]) -> Moments:
    """Check that moments fit the parameters; one that never had a gradient has none.

    Args:
        moments: what ``trainer.pt`` has as the optimizer's state.
        shapes: each parameter's, by name, in the optimizer's order.

    Raises:
        EngineError: a moment is missing, of another shape, or of a parameter that the model does not have.
    """
    apart = "trainer.pt and model of the checkpoint do not belong together"
    if not isinstance(moments, Mapping) or not moments.keys() <= set(range(len(shapes))):
        raise EngineError(f"the optimizer state is not that of {len(shapes)} parameters: {apart}")
    for index, (name, shape) in enumerate(shapes.items()):
        if index not in moments:
            continue
        for what, expected in (("step", ()), *((moment, tuple(shape)) for moment in MOMENTS)):
            value = moments[index].get(what)
            if not isinstance(value, Tensor):
                raise EngineError(f"the optimizer state of {name} has no {what}: {apart}")
            if tuple(value.shape) != expected:
                raise EngineError(
                    f"the optimizer state of {name} has shape {list(value.shape)}, the parameter {list(shape)}: {apart}"
                )
    return moments
