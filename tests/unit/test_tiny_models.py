"""The tiny checkpoints load alike through every loader that the system uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.tiny_models import make_tiny_model, make_tokenizer


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_loads_with_its_ties(tmp_path: Path, arch: str, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, arch, tied=tied, kv_heads=1))
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 264)


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    weights = [
        AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / str(i), seed=seed)).lm_head.weight
        for i, seed in enumerate((3, 3, 4))
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("text", ["1+2=\n", "ä € 語", "  two  spaces"])
def test_tokenizer_round_trips_and_survives_a_reload(tmp_path: Path, text: str) -> None:
    loaded = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    messages = [{"role": "user", "content": text}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == make_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert loaded.decode(loaded(text)["input_ids"]) == text
