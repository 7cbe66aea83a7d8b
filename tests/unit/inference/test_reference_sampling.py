"""Sampling of a token and of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.inference.reference.decoder import load_model
from inflight_runtime.inference.reference.sampling import generate_one, make_generator, sample_token
from support.tiny_models import make_tiny_model


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(-(2**70), 2**70),
)
def test_the_logprob_is_that_of_the_scaled_distribution(logits: list[float], temperature: float, seed: int) -> None:
    tensor = torch.tensor(logits)
    token, logprob = sample_token(tensor, temperature, make_generator(seed))
    assert logprob == pytest.approx(float(torch.log_softmax(tensor / temperature, -1)[token]), abs=1e-6)
    assert sample_token(tensor, temperature, make_generator(seed)) == (token, logprob)


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf"), -3.0])
    generator = make_generator(0)
    drawn = torch.tensor([sample_token(logits, 0.8, generator)[0] for _ in range(20_000)])
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    assert torch.allclose(share, torch.softmax(logits / 0.8, -1), atol=0.01)
    assert share[3] == 0


def test_a_token_of_probability_zero_is_not_drawn_at_the_edges() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")])
    assert {sample_token(logits, 1.0, make_generator(seed))[0] for seed in range(200)} == {1}


def test_each_draw_consumes_one_number_of_the_stream() -> None:
    generator, other = make_generator(4), make_generator(4)
    sample_token(torch.zeros(7), 1.0, generator)
    torch.rand(1, dtype=torch.float64, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    token, logprob = sample_token(logits, 0.0, make_generator(0))
    assert token == 1
    assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[1]))


def test_an_answer_ends_at_its_first_end_token_or_at_its_bound(tmp_path: Path) -> None:
    model = load_model(make_tiny_model(tmp_path))
    free, logprobs = generate_one(model, [1, 2, 3], 30, 1.0, 5, ())
    assert len(free) == len(logprobs) == 30
    end = free[10]
    cut, cut_logprobs = generate_one(model, [1, 2, 3], 30, 1.0, 5, {end})
    first = free.index(end) + 1
    assert (cut, cut_logprobs) == (free[:first], logprobs[:first])
    assert generate_one(model, [1, 2, 3], 30, 1.0, 6, ())[0] != free
