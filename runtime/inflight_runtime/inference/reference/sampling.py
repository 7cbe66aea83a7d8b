"""Sampling of one token and of one whole answer: pure functions, the same arithmetic in the server and in tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from inflight_runtime.inference.reference.decoder import decoder_for


def make_generator(seed: int) -> torch.Generator:
    """The random stream of one answer; any Python integer is a seed."""
    return torch.Generator().manual_seed(seed % (1 << 63))


@torch.inference_mode()
def sample_token(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """Draw a token from ``softmax(logits / temperature)`` by inversion; exactly one uniform number is consumed.

    Args:
        logits: ``[vocabulary]``, any float dtype.
        temperature: above 0; 0 takes the likeliest token.
        generator: the answer's random stream.

    Returns:
        The token id and its log-probability (natural log, float32) under the scaled distribution, over the whole
        vocabulary; at temperature 0 under the unscaled one.
    """
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    logprobs = torch.log_softmax(scaled, -1)
    if temperature == 0.0:
        chosen = int(logprobs.argmax())
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        point = torch.rand(1, dtype=torch.float64, generator=generator) * cumulative[-1]
        # right=True: the first entry above the point, so a token of probability zero is never drawn
        chosen = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
    return chosen, float(logprobs[chosen])


def generate_one(  # noqa: PLR0917  called alike in many tests
    model: nn.Module,
    prompt_ids: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    eos_ids: Collection[int],
) -> tuple[list[int], list[float]]:
    """Sample one answer, exactly as the server does under constant weights.

    Args:
        model: from :func:`~inflight_runtime.inference.reference.decoder.load_model`.
        prompt_ids: at least one token.
        max_tokens: the answer ends after this many tokens.
        temperature: see :func:`sample_token`.
        seed: of this answer.
        eos_ids: the answer ends with the first of these, which is part of it.

    Returns:
        Token ids and one logprob each.
    """
    decoder = decoder_for(model)
    generator = make_generator(seed)
    logits, cache = decoder.step(list(prompt_ids), None)
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token, logprob = sample_token(logits, temperature, generator)
        ids.append(token)
        logprobs.append(logprob)
        if token in eos_ids or len(ids) >= max_tokens:
            return ids, logprobs
        logits, cache = decoder.step([token], cache)
