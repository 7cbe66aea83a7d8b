"""Logprobs of chosen tokens from hidden states; for large vocabularies no [tokens, vocabulary] tensor is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS: Final = 1 << 25
"""Logits in a chunk (128 MiB of float32). When all fit in one, they are kept for the backward pass; else each chunk is
computed again there."""
ENTROPY_ELEMENTS: Final = 1 << 17
"""Logits that the entropy metric looks at per micro-batch, about: a sample of the tokens when there are more."""
ENTROPY_TOKENS: Final = 16
"""The sample has at least so many tokens."""

Head = Callable[[Tensor], Tensor]


def next_token_stats(
    hidden: Tensor,
    head: Head,
    vocab_size: int,
    token_sources: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bonus: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logprobs and entropies of tokens: the selected logit minus the logsumexp of its row.

    Args:
        hidden: ``[K, D]`` last hidden states of the positions that predict something.
        head: language-model head, ``[n, D]`` to logits ``[n, V]``.
        vocab_size: V.
        token_sources: ``int64[T]`` index into ``hidden`` for each token.
        targets: ``int64[T]`` token ids.
        temperature: logits are divided by it first.
        bonus: whether entropies with gradient are wanted.

    Returns:
        ``float32[T]`` logprobs; ``float32[T]`` entropies with gradient, or ``None``; ``float32[S]`` entropies of a
        sample of the tokens (evenly spaced) without gradient.
    """
    rows = max(1, CHUNK_ELEMENTS // vocab_size)
    count = hidden.shape[0]
    if count <= rows:
        logits = scaled_logits(hidden, head, temperature)
        normalizer = logits.logsumexp(-1)
        logprobs = _select(logits, normalizer, token_sources, targets)
        entropy = _entropy(logits, normalizer).index_select(0, token_sources) if bonus else None
        if entropy is not None:
            return logprobs, entropy, entropy.detach()
        with torch.no_grad():
            chosen = token_sources[:: _stride(len(token_sources), vocab_size)]
            return logprobs, None, _entropy(logits[chosen], normalizer[chosen])

    # Tokens in the order of their sources: each chunk of sources then has a run of tokens.
    order = torch.argsort(token_sources, stable=True)
    sorted_sources, sorted_targets = token_sources[order], targets[order]
    parts: list[Tensor] = []
    entropies: list[Tensor] = []
    samples: list[Tensor] = []
    stride = _stride(len(token_sources), vocab_size)
    for start in range(0, count, rows):
        bounds = torch.searchsorted(sorted_sources, torch.tensor([start, start + rows], device=hidden.device)).tolist()
        local = sorted_sources[bounds[0] : bounds[1]] - start
        wanted = sorted_targets[bounds[0] : bounds[1]]
        picked = local[::stride]
        part, entropy, sample = checkpoint(
            _chunk,
            hidden[start : start + rows],
            head,
            local,
            wanted,
            picked,
            temperature,
            bonus,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        parts.append(part)
        entropies.append(entropy)
        samples.append(sample.detach())
    back = torch.argsort(order)
    return torch.cat(parts)[back], torch.cat(entropies)[back] if bonus else None, torch.cat(samples)


def scaled_logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """float32 logits divided by the temperature, whatever precision the head computes in."""
    logits = head(hidden).float()
    return logits if temperature == 1.0 else logits / temperature


def _chunk(  # noqa: PLR0917 (positional: checkpoint)
    hidden: Tensor, head: Head, sources: Tensor, targets: Tensor, picked: Tensor, temperature: float, bonus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logits = scaled_logits(hidden, head, temperature)
    normalizer = logits.logsumexp(-1)
    logprobs = _select(logits, normalizer, sources, targets)
    if bonus:
        entropy = _entropy(logits, normalizer).index_select(0, sources)
        return logprobs, entropy, entropy
    with torch.no_grad():
        return logprobs, logprobs, _entropy(logits[picked], normalizer[picked])


def _select(logits: Tensor, normalizer: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    # index_select, since its backward pass adds up repeated indices in a fixed order.
    chosen = logits.view(-1).index_select(0, rows * logits.shape[1] + columns)
    return chosen - normalizer.index_select(0, rows)


def _entropy(logits: Tensor, normalizer: Tensor) -> Tensor:
    """H = logsumexp - sum p * logit, in nats, of each row."""
    return normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)


def _stride(tokens: int, vocab_size: int) -> int:
    wanted = max(ENTROPY_TOKENS, ENTROPY_ELEMENTS // vocab_size)
    return max(1, -(-tokens // wanted))  # a micro-batch may have no tokens
