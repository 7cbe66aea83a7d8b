"""Sizes that follow from a model's own numbers: known at rendering on one machine, inside the pod in a cluster."""

from __future__ import annotations

from typing import Final

from inflight_runtime.api.rules import DEFAULT_MICRO_BATCH_TOKENS
from inflight_runtime.config.model_files import ModelFacts
from inflight_runtime.config.roles import Dtype

MIN_KV_BYTES: Final = 64 * 1024 * 1024
MAX_KV_BYTES: Final = 2 * 1024 * 1024 * 1024
"""Bounds of a CPU server's KV cache; passed only where one sequence of full length takes more."""


def kv_cache_bytes(facts: ModelFacts, dtype: Dtype, max_length: int, max_concurrent: int) -> int:
    """KV cache of a CPU server: room for all its sequences at full length, within 64 MiB and 2 GiB.

    One sequence of full length always fits, else vLLM refuses to start.
    """
    element = 2 if dtype == "bfloat16" else 4
    # Keys and values; one block of slack, because caches are cut into blocks of 32 tokens.
    one = 2 * facts.layers * facts.kv_heads * facts.head_dim * element * (max_length + 32)
    return max(one, min(max(one * max_concurrent, MIN_KV_BYTES), MAX_KV_BYTES))


def default_micro_batch_tokens(max_length: int) -> int:
    """Token budget of a micro-batch that the job does not give: 8192, or the longest sequence if that is more."""
    return max(DEFAULT_MICRO_BATCH_TOKENS, max_length)
