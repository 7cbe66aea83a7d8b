"""vLLM's requests and outputs in the contract's terms, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.inference.service import ContractError
from inflight_runtime.inference.vllm_plugin.generate import (
    completion,
    encode_reply,
    sampling_arguments,
    shared_seed,
)
from inflight_runtime.protocol import GenerateReply, GenerateRequest, WireSpan


@dataclass
class Label:
    version: str
    start: int
    end: int


@dataclass
class Logprobs:
    logprobs: list[float]


@dataclass
class Output:
    token_ids: list[int]
    logprobs: Logprobs | None
    weight_versions: list[Label] | None = field(default_factory=list)
    finish_reason: str | None = "stop"


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**({"prompt_ids": [1, 2, 3], "max_tokens": 10} | fields))


@given(prompt=st.integers(1, 40), budget=st.integers(1, 60), limit=st.integers(2, 50))
def test_the_budget_is_clipped_to_the_models_length(prompt: int, budget: int, limit: int) -> None:
    request = ask(prompt_ids=[1] * prompt, max_tokens=budget)
    if prompt >= limit:
        with pytest.raises(ContractError, match="shorten the prompt") as caught:
            sampling_arguments(request, limit)
        assert caught.value.status == 400
    else:
        assert sampling_arguments(request, limit)["max_tokens"] == min(budget, limit - prompt)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ContractError, match="empty"):
        sampling_arguments(ask(prompt_ids=[]), 8)


def test_text_is_made_only_where_stop_strings_are_looked_for() -> None:
    assert sampling_arguments(ask(), 50)["detokenize"] is False
    assert sampling_arguments(ask(stop=["x"]), 50)["detokenize"] is True


@pytest.mark.parametrize(
    ("seeds", "n", "seed"), [(None, 3, None), ([9], 1, 9), ([4, 5, 6], 3, 4), ([4, 6, 5], 3, None), ([4, 4], 2, None)]
)
def test_one_seed_stands_for_those_that_count_up(seeds: list[int] | None, n: int, seed: int | None) -> None:
    assert shared_seed(seeds, n) == seed


def test_seeds_must_be_as_many_as_answers() -> None:
    with pytest.raises(ContractError, match="2 seeds for n = 3"):
        shared_seed([1, 2], 3)


def test_a_reply_is_what_the_protocol_says() -> None:
    outputs = [
        Output([5, 6, 7], Logprobs([-0.5, -1.0, -2.0]), [Label("1.4", 0, 2), Label("1.5", 2, 3)], "length"),
        Output([], None, [], "abort"),
    ]
    reply = GenerateReply.model_validate_json(encode_reply("i0", "b", outputs))
    assert (reply.server_id, reply.boot_id) == ("i0", "b")
    first, second = reply.completions
    assert (first.ids, first.logprobs, first.finish) == ([5, 6, 7], [-0.5, -1.0, -2.0], "length")
    assert first.spans == [WireSpan(epoch=1, step=4, start=0, end=2), WireSpan(epoch=1, step=5, start=2, end=3)]
    assert (second.ids, second.spans, second.finish) == ([], [], "abort")


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_every_other_end_is_an_abort(reason: str | None) -> None:
    assert completion(Output([], None, [], reason))["finish"] == "abort"


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ([Label("default", 0, 2)], "default"),
        ([], "cover 2 tokens"),
        (None, "cover 2 tokens"),
        ([Label("1.0", 0, 1)], "cover 2 tokens"),
    ],
)
def test_tokens_without_provenance_never_leave_the_server(labels: list[Label] | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        completion(Output([1, 2], Logprobs([-1.0, -1.0]), labels))


def test_logprobs_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        completion(Output([1, 2], Logprobs([-1.0]), [Label("1.0", 0, 2)]))
