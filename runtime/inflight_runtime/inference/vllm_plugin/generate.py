"""``POST /runtime/v1/generate`` in vLLM's terms: pure conversions, kept cheap since every rollout passes here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from inflight_runtime.inference.service import ContractError
from inflight_runtime.protocol import GenerateRequest
from inflight_runtime.types import Version

FINISH: Final = {"stop": "stop", "length": "length"}
"""Every other end (abort, error) is ``abort`` to the client, which retries the attempt."""

_encode = msgspec.json.Encoder().encode


def sampling_arguments(request: GenerateRequest, max_length: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``: temperature alone, sampled tokens' logprobs, a budget that fits.

    vLLM takes one seed per request and gives answer i the seed ``seed + i``: seeds that count up by one are honoured,
    others only for a single answer. (Splitting the group into single requests would cost the shared prefill.)

    Raises:
        ContractError: 400, the prompt is empty or leaves no room for an answer.
    """
    room = max_length - len(request.prompt_ids)
    if not request.prompt_ids:
        raise ContractError(400, "prompt_ids is empty: a prompt needs at least one token")
    if room < 1:
        raise ContractError(
            400,
            f"the prompt has {len(request.prompt_ids)} tokens, the model takes {max_length} with the answer: "
            "shorten the prompt or raise the model's maximum length",
        )
    return {
        "n": request.n,
        "max_tokens": min(request.max_tokens, room),
        "temperature": request.temperature,
        "seed": shared_seed(request.seeds, request.n),
        "stop": request.stop or None,
        "stop_token_ids": request.stop_token_ids or None,
        "ignore_eos": request.ignore_eos,
        "logprobs": 0,
        "flat_logprobs": True,
        # Stop strings are found in the text; without them nobody needs it.
        "detokenize": bool(request.stop),
        "skip_clone": True,
    }


def shared_seed(seeds: Sequence[int] | None, n: int) -> int | None:
    """The one seed that gives answer i ``seeds[i]`` under vLLM's rule; ``None`` where no seed does.

    Raises:
        ContractError: 400, there are not ``n`` seeds.
    """
    if seeds is None:
        return None
    if len(seeds) != n:
        raise ContractError(400, f"{len(seeds)} seeds for n = {n} answers: send one for each, or none")
    first = seeds[0]
    return first if all(seed == first + offset for offset, seed in enumerate(seeds)) else None


def encode_reply(server_id: str, boot_id: str, outputs: Sequence[Any]) -> bytes:
    """``GenerateReply`` as JSON, straight from vLLM's ``CompletionOutput`` objects.

    Raises:
        ValueError: an output carries no version label, or its logprobs do not match its tokens.
    """
    return _encode(
        {
            "server_id": server_id,
            "boot_id": boot_id,
            "completions": [completion(output) for output in outputs],
        }
    )


def completion(output: Any) -> dict[str, Any]:
    """One answer as the wire's ``Completion``; spans tile exactly its tokens.

    Raises:
        ValueError: see :func:`encode_reply`.
    """
    ids = list(output.token_ids)
    logprobs = output.logprobs.logprobs if output.logprobs is not None else []
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} logprobs")
    spans = [
        {"epoch": version.epoch, "step": version.step, "start": span.start, "end": span.end}
        for span in output.weight_versions or ()
        if span.start < span.end
        for version in (parse_label(span.version),)
    ]
    if (spans[-1]["end"] if spans else 0) != len(ids):
        raise ValueError(f"version spans {spans} do not cover {len(ids)} tokens")
    return {
        "ids": ids,
        "logprobs": logprobs,
        "spans": spans,
        "finish": FINISH.get(output.finish_reason or "", "abort"),
    }


@lru_cache(maxsize=256)
def parse_label(label: str) -> Version:
    """Read the engine's version label.

    Raises:
        ValueError: it is not one of ours (``default``: sampled before the first update).
    """
    return Version.parse(label)
