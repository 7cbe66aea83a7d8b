"""One forward step of one sequence: the lean path for the Llama family and the general path for everything else.

The lean path is what makes a tiny model decode over a thousand tokens a second on one core, where the general one is
bound by Python; both compute the same function. Caches are values: a step returns a new one and never writes to the
old, so that the answers to one prompt share its prefill.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

Cache: TypeAlias = Any
"""Keys and values of the tokens so far; opaque to everybody but the decoder that made it."""

STATIC_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the sequence's length."""


class Decoder(Protocol):
    """Next-token logits of one sequence."""

    def step(self, ids: list[int], cache: Cache | None) -> tuple[Tensor, Cache]:
        """Append ``ids`` to the sequence that ``cache`` holds.

        Args:
            ids: the whole sequence with no cache, or exactly one token with one.
            cache: what an earlier step returned; not changed.

        Returns:
            Logits ``[vocabulary]`` after the last token, in the model's dtype, and the new cache.
        """


def load_model(path: Path | str, dtype: str = "float32", *, trust_remote_code: bool = False) -> nn.Module:
    """Load a causal language model for inference on the CPU.

    Every parameter gets memory of its own: those mapped from a file lie at odd addresses, on which the last bit of a
    product may depend.

    Raises:
        OSError, ValueError: ``path`` holds no such model.
    """
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, attn_implementation="sdpa"
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        parameter.requires_grad_(False)
    return model.eval()


def decoder_for(model: nn.Module) -> Decoder:
    """The lean decoder where it computes the same function, else the general one."""
    return LlamaDecoder(model) if LlamaDecoder.fits(model) else TransformersDecoder(model)


class TransformersDecoder:
    """Any causal language model, through transformers' own forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @torch.inference_mode()
    def step(self, ids: list[int], cache: Cache | None) -> tuple[Tensor, Cache]:
        """See :class:`Decoder`."""
        grown = DynamicCache(config=self._model.config) if cache is None else copy.deepcopy(cache)
        output = self._model(input_ids=torch.tensor([ids]), past_key_values=grown, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1], grown


class LlamaDecoder:
    """Llama and Qwen2, straight from their parameters (read at every step, so an update in place takes effect)."""

    def __init__(self, model: nn.Module) -> None:
        inner: Any = model.model
        config: Any = model.config
        self._embedding: Tensor = inner.embed_tokens.weight
        self._head: Tensor = model.lm_head.weight  # type: ignore[assignment, union-attr]
        self._final_norm: Tensor = inner.norm.weight
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._head_dim: int = inner.layers[0].self_attn.head_dim
        self._grouped: bool = config.num_attention_heads != config.num_key_value_heads
        self._eps = torch.tensor(float(config.rms_norm_eps))
        # rotate_half(x) = roll(x) * sign: doubling the frequencies with the sign folded in saves two operations a layer
        frequencies: Tensor = inner.rotary_emb.inv_freq.float()
        self._frequencies = torch.cat((frequencies, frequencies))
        scaling = float(inner.rotary_emb.attention_scaling)
        self._cos_scale = torch.full((self._head_dim,), scaling)
        self._sin_scale = torch.cat((-self._cos_scale[: self._head_dim // 2], self._cos_scale[self._head_dim // 2 :]))

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether this model is one that :class:`LlamaDecoder` computes."""
        config: Any = model.config
        return (
            type(model).__name__ in ("LlamaForCausalLM", "Qwen2ForCausalLM")
            and config.hidden_act == "silu"
            and not getattr(config, "use_sliding_window", False)
            and (config.rope_parameters or {}).get("rope_type", "default") in STATIC_ROPE
        )

    @torch.inference_mode()
    def step(self, ids: list[int], cache: Cache | None) -> tuple[Tensor, Cache]:
        """See :class:`Decoder`."""
        count = len(ids)
        start = 0 if cache is None else cache[0][0].shape[1]
        hidden = F.embedding(torch.tensor(ids), self._embedding)
        angles = torch.outer(torch.arange(start, start + count, dtype=torch.float32), self._frequencies)
        cos = (angles.cos() * self._cos_scale).to(hidden.dtype)
        sin = (angles.sin() * self._sin_scale).to(hidden.dtype)
        grown: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm)
            query = self._heads(F.linear(normed, layer.q, layer.q_bias), count)
            key = self._heads(F.linear(normed, layer.k, layer.k_bias), count)
            value = self._heads(F.linear(normed, layer.v, layer.v_bias), count)
            rotated = torch.cat((query, key))
            half = self._head_dim // 2
            rotated = torch.addcmul(rotated * cos, rotated.roll(half, -1), sin)
            query, key = rotated[: query.shape[0]], rotated[query.shape[0] :]
            if cache is not None:
                key = torch.cat((cache[index][0], key), 1)
                value = torch.cat((cache[index][1], value), 1)
            grown.append((key, value))
            attended = F.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=count > 1, enable_gqa=self._grouped
            )
            hidden = hidden + F.linear(attended[0].transpose(0, 1).reshape(count, -1), layer.o, layer.o_bias)
            normed = self._norm(hidden, layer.post_norm)
            gated = F.silu(F.linear(normed, layer.gate, layer.gate_bias))
            gated = gated * F.linear(normed, layer.up, layer.up_bias)
            hidden = hidden + F.linear(gated, layer.down, layer.down_bias)
        last = self._norm(hidden[-1:], self._final_norm)
        return F.linear(last, self._head)[0], grown

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        """``[tokens, heads * head_dim]`` to ``[heads, tokens, head_dim]``."""
        return projected.view(count, -1, self._head_dim).transpose(0, 1)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last dimension, in float32."""
        wide = hidden.float()
        square = (wide * wide).sum(-1, keepdim=True)
        scaled = wide * torch.rsqrt(torch.add(self._eps, square, alpha=1 / hidden.shape[-1]))
        return weight * scaled.to(hidden.dtype)


class _Layer:
    """The parameters of one decoder layer under short names."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm: Tensor = layer.input_layernorm.weight
        self.post_norm: Tensor = layer.post_attention_layernorm.weight
        self.q, self.q_bias = _parameters(attention.q_proj)
        self.k, self.k_bias = _parameters(attention.k_proj)
        self.v, self.v_bias = _parameters(attention.v_proj)
        self.o, self.o_bias = _parameters(attention.o_proj)
        self.gate, self.gate_bias = _parameters(mlp.gate_proj)
        self.up, self.up_bias = _parameters(mlp.up_proj)
        self.down, self.down_bias = _parameters(mlp.down_proj)


def _parameters(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias
