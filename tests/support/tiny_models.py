"""Tiny randomly initialised checkpoints with a byte-level tokenizer and a chat template, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Arch = Literal["qwen2", "llama", "qwen3_moe"]

HEAD_DIM = 32
"""The smallest that vLLM's CPU attention takes; a smaller one kills the engine at its first request."""
VOCAB_SIZE = 264
MAX_LENGTH = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte symbols and three specials; BPE without merges, which every loader rebuilds identically."""
    vocabulary = {symbol: index for index, symbol in enumerate((*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=False))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        bos_token=None,
        unk_token=None,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny_model(
    directory: Path,
    arch: Arch = "qwen2",
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    initializer_range: float = 0.02,
    kv_heads: int | None = None,
) -> Path:
    """Write a float32 HF checkpoint of about 100k parameters to ``directory`` and return it.

    ``hidden`` must be a multiple of 32; ``kv_heads`` below ``hidden // 32`` gives grouped-query attention.
    """
    heads = hidden // HEAD_DIM
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make(arch, common)
    model.float().save_pretrained(directory)
    return directory


def _make(arch: Arch, common: dict[str, Any]) -> PreTrainedModel:
    match arch:
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**common))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**common, head_dim=HEAD_DIM))
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": common["hidden_size"]}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=HEAD_DIM, norm_topk_prob=True))
