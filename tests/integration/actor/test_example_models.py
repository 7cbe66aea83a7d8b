"""The examples' models: made by their scripts, read alike by every loader, at the level they promise."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight_runtime.actor.tokenizer import load_tokenizer
from inflight_runtime.config.roles import ModelFiles
from support.models import EXAMPLES, smollm2_model, sort_letters_model

CHATS = [
    [{"role": "user", "content": "sort:abc"}],
    [{"role": "system", "content": "Calculator."}, {"role": "user", "content": "2+3="}],
    [{"role": "user", "content": "naïve ümlaut  two spaces\n\tand 漢字 😀"}, {"role": "assistant", "content": "yes\n"}],
]


@pytest.mark.timeout(900)  # the first one to ask for SmolLM2 converts it
@pytest.mark.parametrize("make", [sort_letters_model, smollm2_model])
def test_the_actor_reads_the_tokenizer_as_transformers_does(make):
    directory = make()
    ours = load_tokenizer(ModelFiles(path=str(directory), tokenizer=str(directory), max_length=128))
    theirs = AutoTokenizer.from_pretrained(directory)
    for chat in CHATS:
        text = ours.render(chat, {})
        assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, special=True) == text
        assert ours.decode(ids, special=False) == theirs.decode(ids, skip_special_tokens=True)


@torch.no_grad()
def sampled_exact(directory, prompts: int = 128) -> float:
    """Share of right answers when sampled at temperature 1, over random strings."""
    sys.path.insert(0, str(EXAMPLES / "sort-letters"))
    from sort_letters import SortLetters

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    environment = SortLetters(seed=99)
    problems = [environment.problem(index) for index in range(prompts)]
    chats = [
        tokenizer.apply_chat_template(environment.messages(p), tokenize=False, add_generation_prompt=True)
        for p in problems
    ]
    ids = torch.tensor([tokenizer.encode(chat, add_special_tokens=False) for chat in chats])
    torch.manual_seed(random.Random(0).randint(0, 2**31))
    out = model.generate(ids, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=6)
    answers = [tokenizer.decode(row, skip_special_tokens=True) for row in out[:, ids.shape[1] :]]
    return sum(answer == "".join(sorted(problem)) for answer, problem in zip(answers, problems, strict=True)) / prompts


def test_the_sorting_model_has_only_begun_to_understand():
    assert 0.03 <= sampled_exact(sort_letters_model()) <= 0.25


def test_smollm2_is_an_ordinary_checkpoint_that_answers():
    directory = smollm2_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert model.config.tie_word_embeddings
    assert model.num_parameters() == 134_515_008
    chat = [{"role": "user", "content": "What is 2+3? Answer with a number."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "5" in tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
