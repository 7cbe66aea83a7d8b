import pytest
import torch

from inflight_runtime.weights.names import checkpoint_name, checkpoint_tensors


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("module.module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("model.layers.3._checkpoint_wrapped_module.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("_fsdp_wrapped_module.model.layers.3._orig_mod.x", "model.layers.3.x"),
        ("model.module.weight", "model.module.weight"),
    ],
)
def test_wrapper_parts_are_stripped(wrapped, plain):
    assert checkpoint_name(wrapped) == plain


def test_a_tied_output_head_is_left_out_and_an_untied_one_kept():
    tensors = {"model.embed_tokens.weight": torch.zeros(2), "module.lm_head.weight": torch.zeros(2)}
    assert [name for name, _ in checkpoint_tensors(tensors.items(), tied=True)] == ["model.embed_tokens.weight"]
    assert [name for name, _ in checkpoint_tensors(tensors.items(), tied=False)] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


def test_two_tensors_under_one_name_are_refused():
    tensors = {"a.weight": torch.zeros(2), "module.a.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"'a\.weight' and 'module\.a\.weight' are both 'a\.weight'"):
        list(checkpoint_tensors(tensors.items(), tied=False))


def test_tensors_are_read_one_at_a_time():
    gathered = []

    def gather():
        for index in range(3):
            gathered.append(index)
            yield f"w{index}", torch.zeros(1)

    tensors = checkpoint_tensors(gather(), tied=False)
    next(tensors)
    assert gathered == [0]
