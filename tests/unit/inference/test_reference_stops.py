"""Stop strings and streamed text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.inference.reference.stops import TextStream, cut_at_stop, stop_check
from support.tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()


@given(ids=st.lists(st.integers(0, 258), max_size=60), stop=st.lists(st.text("ab1", max_size=3), max_size=3))
def test_streamed_pieces_add_up_to_the_text_before_the_stop(ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == cut_at_stop(TOKENIZER.decode(ids, skip_special_tokens=True), stop)


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(TOKENIZER, [])
    pieces = [stream.push(token) for token in TOKENIZER("é!")["input_ids"]]
    assert pieces == ["", "é", "!"]


def test_a_stop_string_is_seen_across_tokens_and_only_when_complete() -> None:
    ids = TOKENIZER("say END now")["input_ids"]
    check = stop_check(TOKENIZER, ["END"])
    assert check is not None
    assert [check(ids[:count]) for count in (6, 7, 8)] == [False, True, True]
    assert cut_at_stop("say END now", ["END", "now"]) == "say "


def test_no_stop_strings_means_no_check() -> None:
    assert stop_check(TOKENIZER, []) is None
    assert stop_check(TOKENIZER, [""]) is None
