"""What a sequence's logprobs must be when the weights changed under it and its old KV cache was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


@torch.no_grad()
def kept_cache_logprobs(
    stretches: Sequence[tuple[Any, int]], prompt_ids: list[int], ids: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """``float32[len(ids)]`` by plain transformers, each stretch of tokens under its own model.

    A token's KV is computed when it is fed to sample the next one, so by the model that samples the next one: the cache
    holds each position as the server's does.

    Args:
        stretches: ``(model, end)`` in order: answer tokens up to ``end`` (exclusive) were sampled by ``model``.
        prompt_ids: the prompt.
        ids: the answer; the last ``end`` is its length.
        temperature: divides the logits.
    """
    cache = DynamicCache()
    fed = prompt_ids + ids[:-1]
    start, found = 0, []
    for model, end in stretches:
        stop = len(prompt_ids) - 1 + end
        logits = model(torch.tensor([fed[start:stop]]), past_key_values=cache, use_cache=True).logits[0].float()
        found.append(torch.log_softmax(logits / temperature, -1))
        start = stop
    table = torch.cat(found)[len(prompt_ids) - 1 :]
    return table.gather(1, torch.tensor(ids)[:, None])[:, 0]
