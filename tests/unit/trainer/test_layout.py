"""What a trainer exports has the names, shapes and values of the checkpoint that its model came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, MixtralConfig
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from inflight_runtime.trainer import layout
from inflight_runtime.trainer.batching import build_step
from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.layout import CheckpointLayout
from inflight_runtime.trainer.packing import plan_step
from support.tiny_models import make_tiny_model
from support.trainer_fakes import random_group, step_batch, trainer_config
from support.trainer_side import hf_logits, load_exported, load_hf

SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4)
# One dense layer, then experts beside a shared one, chosen with a bias that is a buffer.
GLM4_MOE = Glm4MoeConfig(
    **SMALL, head_dim=32, moe_intermediate_size=48, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
)


def made_of(config: Any) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        return directory

    return make


def qwen3_moe(directory: Path) -> Path:
    return make_tiny_model(directory, "qwen3_moe", tied=False, initializer_range=0.1)


def started(directory: Path, model: Path, resume: Path | None = None) -> SingleEngine:
    engine = SingleEngine()
    engine.init(trainer_config(directory, model), resume, 0)
    return engine


def train_a_step(engine: SingleEngine) -> None:
    rng = np.random.default_rng(0)
    data = build_step(step_batch(1, [random_group(rng, index) for index in range(2)]), engine.config)
    for batch in plan_step(data.sequences, 512, 0.0):
        engine.backward(engine.forward(batch).logprobs.sum(), last=True)
    assert engine.optimizer_step().applied


def tied(directory: Path) -> Path:
    return make_tiny_model(directory, "qwen2", tied=True, initializer_range=0.1)


def untied(directory: Path) -> Path:
    return make_tiny_model(directory, "llama", tied=False, initializer_range=0.1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (tied, "model.layers.0.self_attn.q_proj.bias"),
        (untied, "lm_head.weight"),
        (qwen3_moe, "model.layers.0.mlp.experts.3.gate_proj.weight"),
        (made_of(MIXTRAL), "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        (made_of(GLM4_MOE), "model.layers.1.mlp.experts.3.gate_proj.weight"),
    ],
    ids=["qwen2", "llama", "qwen3_moe", "mixtral", "glm4_moe"],
)
def test_tensors_are_exported_and_saved_as_they_were_loaded(
    tmp_path: Path, make: Callable[[Path], Path], name: str
) -> None:
    files = load_file(make(tmp_path / "model") / "model.safetensors")
    engine = started(tmp_path, tmp_path / "model")
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    assert name in exported
    assert exported.keys() == files.keys()
    assert all(torch.equal(tensor, files[name]) for name, tensor in exported.items())

    train_a_step(engine)
    moved = {name: tensor.clone() for name, tensor in engine.export_weights()}
    assert not torch.equal(moved[name], files[name])
    trained = hf_logits(engine.model)
    assert torch.equal(hf_logits(load_exported(moved, tmp_path / "model", tmp_path / "plain")), trained)
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    assert torch.equal(hf_logits(load_hf(tmp_path / "saved" / "model")), trained)
    again = dict(started(tmp_path, tmp_path / "model", resume=tmp_path / "saved").export_weights())
    assert again.keys() == files.keys()
    assert all(torch.equal(tensor, moved[name]) for name, tensor in again.items())


def test_tensors_are_converted_one_at_a_time(tmp_path: Path) -> None:
    model = load_hf(qwen3_moe(tmp_path))
    asked: list[str] = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            asked.append(name)
            yield f"module.{name}", parameter.detach()

    for name, _ in CheckpointLayout(model).tensors(gather()):
        # The last one asked for is the one that this comes from.
        assert name.partition(".experts.")[0] == asked[-1].partition(".experts.")[0]
    assert len(asked) == len(list(model.named_parameters()))


def more(files: dict[str, Tensor]) -> None:
    files["model.layers.2.input_layernorm.weight"] = torch.zeros(64)


def less(files: dict[str, Tensor]) -> None:
    del files["model.layers.0.input_layernorm.weight"]  # transformers only warns, and trains a fresh one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (more, "missing parameters: model.layers.2.input_layernorm.weight"),
        (less, "unknown parameters: model.layers.0.input_layernorm.weight"),
    ],
)
def test_a_model_that_would_be_exported_otherwise_than_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    path = make_tiny_model(tmp_path / "model") / "model.safetensors"
    files = load_file(path)
    change(files)
    save_file(files, path, {"format": "pt"})
    with pytest.raises(EngineError, match=rf"would not be exported as it lies in its files: {words}"):
        started(tmp_path, tmp_path / "model")


def test_a_layout_that_transformers_does_not_undo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "revert_weight_conversion", lambda model, tensors: tensors)
    with pytest.raises(EngineError, match=r"unknown parameters: model\.layers\.0\.mlp\.experts\.gate_up_proj, "):
        started(tmp_path, qwen3_moe(tmp_path / "model"))


def test_a_tensor_that_was_cut_into_several_is_refused(tmp_path: Path) -> None:
    model = load_hf(make_tiny_model(tmp_path, "llama"))
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(dim=0)])]
    with pytest.raises(EngineError, match=r"several tensors of the checkpoint's model\.layers\.0\.self_attn\.qkv"):
        CheckpointLayout(model)


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"cannot be exported: .*no safetensors file"):
        started(tmp_path, path)
