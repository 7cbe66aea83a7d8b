from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2PreTrainedModel

from inflight_runtime.config.roles import Dtype, LossConfig, OptimizerConfig
from inflight_runtime.trainer.batching import build_step
from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.packing import MicroBatch, plan_step
from support.tiny_models import make_tiny_model
from support.trainer_fakes import random_group, step_batch, trainer_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


def started(directory: Path, path: Path, *, dtype: Dtype = "float32", **changes: object) -> SingleEngine:
    engine = SingleEngine()
    config = trainer_config(directory, path, **changes)
    engine.init(config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}), None, 0)
    return engine


def micro_batch(engine: SingleEngine) -> MicroBatch:
    rng = np.random.default_rng(0)
    data = build_step(step_batch(1, [random_group(rng, index) for index in range(2)]), engine.config)
    (batch,) = plan_step(data.sequences, 512, 0.0)
    return batch


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ValueError, match=r"'deepspeeed' is not known: expected one of .*single"):
        make_engine("deepspeeed")


def test_info_describes_the_model(tmp_path: Path, model: Path) -> None:
    engine = make_engine("single")
    info = engine.init(trainer_config(tmp_path, model), None, 0)
    assert (info.vocab_size, info.hidden_size) == (264, 64)
    assert info.parameters == sum(tensor.numel() for _, tensor in engine.export_weights())


def test_tied_weights_are_exported_once_under_their_checkpoint_names(tmp_path: Path) -> None:
    for tied in (True, False):
        path = make_tiny_model(tmp_path / f"tied-{tied}", "llama", tied=tied)
        names = [name for name, _ in started(tmp_path, path).export_weights()]
        assert len(names) == len(set(names))
        assert ("lm_head.weight" in names) == (not tied)
        assert "model.embed_tokens.weight" in names


def test_the_temperature_is_applied_to_the_logits(tmp_path: Path, model: Path) -> None:
    hot, cold = (started(tmp_path, model, temperature=value) for value in (2.0, 1.0))
    batch = micro_batch(cold)
    assert hot.forward(batch).entropy_sample.mean() > cold.forward(batch).entropy_sample.mean()
    ids = torch.from_numpy(batch.ids)
    with torch.no_grad():
        logits = cold.model(input_ids=ids[:1, :12]).logits[0, 11]
        expected = (logits / 2.0).log_softmax(-1)
    first = [i for i, s in enumerate(batch.token_sources.tolist()) if batch.sources[s] == 11]
    assert first
    got = hot.forward(batch).logprobs[first]
    assert got.tolist() == pytest.approx(expected[torch.from_numpy(batch.targets)[first]].tolist(), abs=1e-5)


def test_entropy_has_a_gradient_only_with_a_bonus(tmp_path: Path, model: Path) -> None:
    plain = started(tmp_path, model)
    bonus = started(tmp_path, model, loss=LossConfig(entropy_bonus=0.01))
    batch = micro_batch(plain)
    assert plain.forward(batch).entropy is None
    stats = bonus.forward(batch)
    assert stats.entropy.requires_grad
    assert not stats.entropy_sample.requires_grad
    assert plain.forward(batch).entropy_sample.mean().item() == pytest.approx(stats.entropy.mean().item(), rel=1e-5)


def test_clipping_scales_the_gradient_and_reports_the_norm_before(tmp_path: Path, model: Path) -> None:
    engine = started(tmp_path, model, optimizer=OptimizerConfig(grad_clip_norm=0.5, learning_rate=0.0))
    engine.backward(engine.forward(micro_batch(engine)).logprobs.sum() * 10, last=True)
    expected = torch.cat([parameter.grad.flatten() for parameter in engine.parameters]).norm().item()
    norms: list[float] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in engine.parameters]).norm().item())
    )
    stats = engine.optimizer_step()
    assert stats.grad_norm == pytest.approx(expected, rel=1e-5)
    assert norms == pytest.approx([0.5], rel=1e-4)
    assert all(parameter.grad is None for parameter in engine.parameters)


@pytest.mark.parametrize("skip", [True, False])
def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path: Path, model: Path, skip: bool) -> None:
    engine = started(tmp_path, model)
    before = [parameter.detach().clone() for parameter in engine.parameters]
    factor = 1.0 if skip else math.nan
    engine.backward(engine.forward(micro_batch(engine)).logprobs.sum() * factor, last=True)
    stats = engine.optimizer_step(skip=skip)
    assert not stats.applied
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters, strict=True))
    assert not engine.optimizer.state_dict()["state"]
    assert all(parameter.grad is None for parameter in engine.parameters)


def test_biases_and_norms_are_not_decayed(tmp_path: Path, model: Path) -> None:
    engine = started(tmp_path, model, optimizer=OptimizerConfig(weight_decay=0.5))
    decayed = {
        parameter: group["weight_decay"] for group in engine.optimizer.param_groups for parameter in group["params"]
    }
    for name, parameter in engine.model.named_parameters():
        assert decayed[parameter] == (0.5 if parameter.dim() > 1 else 0.0), name


def test_bfloat16_computes_under_autocast_with_float32_master_weights(tmp_path: Path, model: Path) -> None:
    full = started(tmp_path, model)
    half = started(tmp_path, model, dtype="bfloat16")
    batch = micro_batch(full)
    exact, rounded = full.forward(batch).logprobs, half.forward(batch).logprobs
    assert rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.25
    assert all(tensor.dtype == torch.float32 for _, tensor in half.export_weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_computes_in_the_configs_precision_and_its_logits_become_float32_as_in_servers(
    tmp_path: Path, model: Path, dtype: Dtype
) -> None:
    engine = started(tmp_path, model, dtype=dtype)
    logits: list[torch.Tensor] = []
    engine.model.get_output_embeddings().register_forward_hook(lambda module, given, output: logits.append(output))
    batch = micro_batch(engine)
    logprobs = engine.forward(batch).logprobs
    (found,) = logits
    assert found.dtype == getattr(torch, dtype)
    expected = found.float().log_softmax(-1)[torch.from_numpy(batch.token_sources), torch.from_numpy(batch.targets)]
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected, atol=1e-5)


def gradients(engine: SingleEngine) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of a micro-batch, and the bytes that were kept for them from the forward pass."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine.forward(micro_batch(engine)).logprobs.sum()
    engine.backward(loss, last=True)
    return {name: parameter.grad for name, parameter in engine.model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_checkpointing_keeps_less_and_changes_no_gradient(tmp_path: Path, dtype: Dtype) -> None:
    path = make_tiny_model(tmp_path / "model", layers=4, initializer_range=0.1)
    plain, much = gradients(started(tmp_path, path, dtype=dtype))
    again, little = gradients(started(tmp_path, path, dtype=dtype, activation_checkpointing=True))
    assert little < much / 2
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def test_a_checkpoint_goes_on_with_activation_checkpointing_and_without(tmp_path: Path, model: Path) -> None:
    def trained(engine: SingleEngine) -> dict[str, torch.Tensor]:
        engine.backward(engine.forward(micro_batch(engine)).logprobs.sum(), last=True)
        assert engine.optimizer_step().applied
        return {name: tensor.clone() for name, tensor in engine.export_weights()}

    weights = {}
    for first in (False, True):
        begun = started(tmp_path, model, activation_checkpointing=first)
        trained(begun)
        (directory := tmp_path / str(first)).mkdir()
        begun.save(directory)
        for then in (False, True):
            later = SingleEngine()
            later.init(trainer_config(tmp_path, model, activation_checkpointing=then), directory, 1)
            weights[first, then] = trained(later)
    for way, tensors in weights.items():
        assert tensors.keys() == weights[False, False].keys()
        assert all(torch.equal(tensor, weights[False, False][name]) for name, tensor in tensors.items()), way


def test_activation_checkpointing_of_a_model_without_known_blocks_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen2PreTrainedModel, "_no_split_modules", None)
    with pytest.raises(EngineError, match="Qwen2ForCausalLM does not say which of its modules are blocks"):
        started(tmp_path, model, activation_checkpointing=True)


def test_a_model_that_ignores_the_mask_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.functional.scaled_dot_product_attention

    def causal_only(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        kwargs.update(attn_mask=None, is_causal=True)
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", causal_only)
    with pytest.raises(EngineError, match="ignores the attention mask"):
        started(tmp_path, model)


def test_a_sliding_window_shorter_than_the_sequences_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 128, "use_sliding_window": True}))
    with pytest.raises(EngineError, match="sliding window of 128 tokens and max_length is 256"):
        started(tmp_path, path)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be loaded"):
        started(tmp_path, tmp_path)


def test_cuda_without_a_device_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="no CUDA device"):
        started(tmp_path, model, device="cuda")


def test_hyperparameters_of_the_config_win_over_saved_ones(tmp_path: Path, model: Path) -> None:
    first = started(tmp_path, model)
    first.backward(first.forward(micro_batch(first)).logprobs.sum(), last=True)
    first.optimizer_step()
    first.save(tmp_path)
    second = SingleEngine()
    changed = OptimizerConfig(betas=(0.5, 0.6), weight_decay=0.3)
    second.init(trainer_config(tmp_path, model, optimizer=changed), tmp_path, 1)
    assert second.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.3
    left, right = (engine.optimizer.state_dict()["state"] for engine in (first, second))
    assert all(torch.equal(left[key]["exp_avg"], right[key]["exp_avg"]) for key in left)


def test_optimizer_state_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    started(tmp_path, model).save(tmp_path)
    other = started(tmp_path, make_tiny_model(tmp_path / "other", layers=1))
    other.save(tmp_path / "b")
    (tmp_path / "trainer.pt").write_bytes((tmp_path / "b/trainer.pt").read_bytes())
    with pytest.raises(EngineError, match="not of this model"):
        SingleEngine().init(trainer_config(tmp_path, model), tmp_path, 1)
