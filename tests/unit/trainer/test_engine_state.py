from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.engines.state import SHARDED, WHOLE, check_moments, read_state, write_state
from support.tiny_models import make_tiny_model
from support.trainer_fakes import trainer_config

SHAPES = {"model.weight": (2, 3), "model.bias": (3,)}


def moments(**changes: Any) -> dict[int, dict[str, Tensor]]:
    def of(*shape: int) -> dict[str, Tensor]:
        return {"step": torch.tensor(4.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}

    return {0: of(2, 3) | changes, 1: of(3)}


def test_moments_that_fit_are_taken_and_some_may_be_absent() -> None:
    assert check_moments(moments(), SHAPES).keys() == {0, 1}
    assert check_moments({1: moments()[1]}, SHAPES).keys() == {1}, "a parameter that never had a gradient"
    assert check_moments({}, SHAPES) == {}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (moments(exp_avg=torch.zeros(3, 2)), r"model.weight has shape \[3, 2\], the parameter \[2, 3\]"),
        (moments(exp_avg_sq=torch.zeros(6)), r"model.weight has shape \[6\], the parameter \[2, 3\]"),
        (moments(exp_avg_sq=None), "model.weight has no exp_avg_sq"),
        (moments(step=None), "model.weight has no step"),
        (moments() | {2: moments()[1]}, "not that of 2 parameters"),
        (None, "not that of 2 parameters"),
    ],
)
def test_moments_that_do_not_fit_are_refused(found: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message + ".*do not belong together"):
        check_moments(found, SHAPES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as an optimizer's state: EOFError"),
        (b"not a torch file", "cannot be read as an optimizer's state"),
        ([1, 2], "cannot be read as an optimizer's state: TypeError"),
        ({"format": WHOLE}, "cannot be read as an optimizer's state: KeyError: 'parameters'"),
        ({"format": 7, "parameters": [], "step": 1}, "has format 7, which this version does not know"),
        ({"format": WHOLE, "parameters": ["other"], "step": 1}, "is not of this model"),
    ],
)
def test_a_state_that_is_none_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "trainer.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(EngineError, match=f"{path} {message}"):
        read_state(path, WHOLE, list(SHAPES))


def test_a_state_of_another_layout_gives_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trainer.pt"
    write_state(path, {"format": SHARDED, "parameters": list(SHAPES), "step": 1})
    assert read_state(path, WHOLE, list(SHAPES)) is None
    assert (
        "was written by the engine 'fsdp2': the weights are taken over and the optimizer begins afresh" in caplog.text
    )


def test_a_model_of_other_tensors_than_its_config_says_is_no_model(tmp_path: Path) -> None:
    wide, narrow = (make_tiny_model(tmp_path / str(hidden), hidden=hidden) for hidden in (64, 32))
    whole = (wide / "model.safetensors").read_bytes()
    (wide / "model.safetensors").write_bytes((narrow / "model.safetensors").read_bytes())
    with pytest.raises(EngineError, match=f"model {wide} cannot be loaded"):
        SingleEngine().init(trainer_config(tmp_path, wide), None, 0)
    (wide / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match=f"model {wide} cannot be loaded"):
        SingleEngine().init(trainer_config(tmp_path, wide), None, 0)
