"""Outlines of models, which the ranks that load none of them begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.trainer.engines.model import allocate, load_model, outline_model
from support.tiny_models import Arch, make_tiny_model
from support.trainer_fakes import trainer_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3_moe"])
def test_an_outline_filled_with_the_weights_is_the_model(tmp_path: Path, arch: Arch) -> None:
    config = trainer_config(tmp_path, make_tiny_model(tmp_path / "model", arch, tied=arch == "qwen2"))
    loaded, outline = load_model(config, None), outline_model(config, None)
    pairs = [
        pair
        for kind in ("named_parameters", "named_buffers")
        for pair in zip(getattr(loaded, kind)(), getattr(outline, kind)(), strict=True)
    ]
    assert all(tensor.is_meta for _, (_, tensor) in pairs)
    allocate((tensor for _, (_, tensor) in pairs), CPU)
    with torch.no_grad():
        for (name, whole), (other, tensor) in pairs:
            assert (name, whole.shape, whole.dtype) == (other, tensor.shape, tensor.dtype)
            tensor.copy_(whole)
    ids = torch.arange(20)[None]
    assert torch.equal(outline(ids).logits, loaded(ids).logits)


def test_tied_and_frozen_weights_stay_so(tmp_path: Path) -> None:
    config = trainer_config(tmp_path, make_tiny_model(tmp_path / "model", tied=True))
    outline = outline_model(config, None)
    outline.model.norm.weight.requires_grad_(False)
    allocate(outline.parameters(), CPU)
    assert outline.lm_head.weight is outline.model.embed_tokens.weight
    assert not outline.model.norm.weight.requires_grad
    assert outline.lm_head.weight.requires_grad


def test_an_outline_takes_no_weights_but_a_config(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    (path / "model.safetensors").unlink()
    config = trainer_config(tmp_path, path)
    assert outline_model(config, None).lm_head.weight.is_meta
    (path / "config.json").unlink()
    with pytest.raises(EngineError, match="cannot be loaded"):
        outline_model(config, None)
