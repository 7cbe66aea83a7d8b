"""The lean forward computes what transformers computes, token by token and at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight_runtime.inference.reference.decoder import LlamaDecoder, TransformersDecoder, decoder_for, load_model
from support.tiny_models import make_tiny_model

IDS = [3, 250, 17, 17, 99, 0, 263, 8]


@pytest.fixture(
    params=[("qwen2", True, None), ("qwen2", False, 1), ("llama", True, 2), ("llama", False, None)],
    ids=lambda p: f"{p[0]}-tied{p[1]}-kv{p[2]}",
)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    arch, tied, kv_heads = request.param
    return make_tiny_model(
        tmp_path, arch, tied=tied, hidden=64 if kv_heads != 2 else 128, kv_heads=kv_heads, initializer_range=0.1
    )


def test_logits_are_those_of_transformers(directory: Path) -> None:
    model: Any = load_model(directory)
    lean, general = LlamaDecoder(model), TransformersDecoder(model)
    assert isinstance(decoder_for(model), LlamaDecoder)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    for decoder in (lean, general):
        logits, cache = decoder.step(IDS[:3], None)
        assert torch.allclose(logits, expected[2], atol=1e-5)
        for position in range(3, len(IDS)):
            logits, cache = decoder.step([IDS[position]], cache)
            assert torch.allclose(logits, expected[position], atol=1e-5)


@pytest.mark.parametrize("kind", [LlamaDecoder, TransformersDecoder])
def test_a_cache_is_a_value_that_a_step_does_not_change(tmp_path: Path, kind: Any) -> None:
    decoder = kind(load_model(make_tiny_model(tmp_path)))
    _, shared = decoder.step(IDS, None)
    first, _ = decoder.step([5], shared)
    decoder.step([6], shared)
    again, _ = decoder.step([5], shared)
    assert torch.equal(first, again)


def test_bfloat16_agrees_with_transformers_within_its_precision(tmp_path: Path) -> None:
    model: Any = load_model(make_tiny_model(tmp_path), "bfloat16")
    logits, _ = LlamaDecoder(model).step(IDS, None)
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0, -1]
    assert torch.allclose(logits.float(), expected.float(), atol=2e-2)


def test_an_update_in_place_takes_effect_at_the_next_step(tmp_path: Path) -> None:
    model: Any = load_model(make_tiny_model(tmp_path / "a", seed=0))
    other: Any = load_model(make_tiny_model(tmp_path / "b", seed=1))
    decoder = LlamaDecoder(model)
    before, _ = decoder.step(IDS, None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dict(other.named_parameters())[name])
    after, _ = decoder.step(IDS, None)
    assert not torch.equal(before, after)
    assert torch.equal(after, LlamaDecoder(other).step(IDS, None)[0])


def test_what_the_lean_forward_does_not_compute_goes_through_transformers(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    model.config.use_sliding_window = True
    assert isinstance(decoder_for(model), TransformersDecoder)
    model.config.use_sliding_window = False
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert isinstance(decoder_for(model), TransformersDecoder)


def test_loaded_parameters_have_aligned_memory_of_their_own(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
