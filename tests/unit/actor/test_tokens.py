"""Segments: sampled ids are kept as they came; a conversation that goes on extends them, a rewritten one does not."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_runtime.actor.tokens import Recorder, build_segments, sampling_seed, shorten
from inflight_runtime.protocol import Completion, VersionField, WireSpan
from inflight_runtime.types import Attempt, Group, Version
from support.actor_fakes import EOS, EOS_TEXT, CharCodec, make_completion

CODEC = CharCodec()
WORDS = st.text(st.characters(codec="utf-8", exclude_characters=EOS_TEXT, min_codepoint=32), max_size=6)


class AwkwardCodec(CharCodec):
    """Two ids for one text: what was sampled is not what encoding its text would give."""

    def encode(self, text: str) -> list[int]:
        return list(super().encode(text))

    def decode(self, ids, *, special):
        return super().decode([token - 10_000 if token >= 10_000 else token for token in ids], special=special)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(contents)]


def say(recorder: Recorder, messages: list[dict[str, str]], ids: list[int], step: int = 3) -> str:
    turn = recorder.open_text(CODEC.render(messages, {}))
    return recorder.complete(turn, make_completion(ids, VersionField(epoch=1, step=step)), "s0", "b0")


def letters(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_a_single_turn_is_one_segment_after_the_shared_prompt():
    recorder = Recorder(CODEC)
    text = say(recorder, chat("hi"), [*letters("yo"), EOS])
    assert text == "yo"
    prompt = CODEC.encode("<user>hi§<assistant>")
    (segment,) = build_segments(recorder.histories, prompt)
    segment.validate()
    assert segment.shares_prompt
    assert segment.ids.tolist() == [*letters("yo"), EOS]
    assert segment.mask.all()
    assert [(s.version, s.start, s.end, s.server, s.boot_id) for s in segment.spans] == [
        (Version(1, 3), 0, 3, "s0", "b0")
    ]
    assert recorder.prompt_text == "<user>hi§<assistant>"
    assert recorder.text() == "yo"


def test_a_later_turn_appends_only_what_is_new_and_masks_it():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    say(recorder, chat("hi", "yo", "and"), [*letters("so"), EOS], step=4)
    prompt = CODEC.encode("<user>hi§<assistant>")
    (segment,) = build_segments(recorder.histories, prompt)
    segment.validate()
    given = [*letters("<user>and"), EOS, *letters("<assistant>")]
    assert segment.ids.tolist() == [*letters("yo"), EOS, *given, *letters("so"), EOS]
    assert segment.mask.tolist() == [True] * 3 + [False] * len(given) + [True] * 3
    assert [(s.version.step, s.start, s.end) for s in segment.spans] == [(3, 0, 3), (4, 3 + len(given), 6 + len(given))]


def test_a_truncated_answer_is_continued_with_what_the_template_adds():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), letters("yo"))
    turn = recorder.open_text(CODEC.render(chat("hi", "yo", "go on"), {}))
    assert not turn.is_new
    assert CODEC.decode(turn.given, special=True) == "§<user>go on§<assistant>"


def test_a_template_that_rewrites_history_opens_a_segment_of_its_own():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    say(recorder, chat("it was about hi", "yo", "and"), [*letters("so"), EOS])
    first, second = build_segments(recorder.histories, CODEC.encode("<user>hi§<assistant>"))
    first.validate()
    second.validate()
    assert first.shares_prompt
    assert not second.shares_prompt
    assert second.ids.tolist()[:-3] == CODEC.encode("<user>it was about hi§<assistant>yo§<user>and§<assistant>")
    assert second.mask.sum() == 3


def test_a_rewritten_history_that_still_starts_with_the_prompt_shares_it():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    say(recorder, chat("hi", "shortened", "and"), [*letters("so"), EOS])
    first, second = build_segments(recorder.histories, CODEC.encode("<user>hi§<assistant>"))
    second.validate()
    assert first.shares_prompt
    assert second.shares_prompt
    assert second.ids.tolist()[:-3] == CODEC.encode("shortened§<user>and§<assistant>")


def test_sampled_ids_survive_even_where_their_text_would_encode_differently():
    recorder = Recorder(AwkwardCodec())
    sampled = [10_000 + ord("y"), ord("o"), EOS]
    assert say(recorder, chat("hi"), sampled) == "yo"
    turn = recorder.open_text(CODEC.render(chat("hi", "yo", "and"), {}))
    assert not turn.is_new
    assert turn.prompt_ids[: -len(turn.given)][-3:] == sampled


def test_a_tokenizer_that_adds_a_space_to_whatever_it_encodes_is_not_trusted_with_a_rest():
    class Spaced(CharCodec):
        def encode(self, text: str) -> list[int]:
            return super().encode(" " + text)

    recorder = Recorder(Spaced())
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    assert recorder.open_text(CODEC.render(chat("hi", "yo", "and"), {})).is_new


def test_a_turn_under_way_is_not_continued_by_another():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    messages = CODEC.render(chat("hi", "yo", "and"), {})
    first, second = recorder.open_text(messages), recorder.open_text(messages)
    assert not first.is_new
    assert second.is_new
    recorder.cancel(first)
    assert not recorder.open_text(messages).is_new


def test_a_failed_turn_leaves_nothing_behind():
    recorder = Recorder(CODEC)
    say(recorder, chat("hi"), [*letters("yo"), EOS])
    before = list(recorder.histories[0].ids)
    recorder.cancel(recorder.open_text(CODEC.render(chat("hi", "yo", "and"), {})))
    assert recorder.histories[0].ids == before


def test_ids_that_continue_a_sequence_extend_it_and_others_do_not():
    recorder = Recorder(CODEC)
    turn = recorder.open_ids([1, 2, 3])
    recorder.complete(turn, make_completion([4, 5]), "s0", "b0")
    assert not recorder.open_ids([1, 2, 3, 4, 5, 9]).is_new
    assert recorder.open_ids([1, 2, 9]).is_new


def test_an_answer_without_tokens_is_not_recorded():
    recorder = Recorder(CODEC)
    turn = recorder.open_text("prompt")
    empty = Completion(ids=[], logprobs=[], spans=[], finish="stop")
    assert recorder.complete(turn, empty, "s0", "b0") == ""
    assert recorder.histories == []


@st.composite
def conversations(draw):
    """Turns of (what the user says, whether the past is rewritten first, what is sampled, with which versions)."""
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        body = draw(st.lists(st.sampled_from(letters("abc ")), max_size=5))
        ids = [*body, EOS] if draw(st.booleans()) or not body else body
        cut = draw(st.integers(0, len(ids)))
        turns.append((draw(WORDS), draw(st.booleans()), ids, cut))
    return turns


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_any_conversation_gives_valid_segments_that_hold_exactly_what_was_sampled(turns):
    recorder = Recorder(CODEC)
    messages: list[dict[str, str]] = []
    sampled: list[int] = []
    rewrites = 0
    for index, (said, rewritten, ids, cut) in enumerate(turns):
        if rewritten and index > 0:
            messages = [{"role": "system", "content": f"summary {index}"}]
            rewrites += 1
        messages.append({"role": "user", "content": said})
        rendered = CODEC.render(messages, {})
        turn = recorder.open_text(rendered)
        # What the server sees is what the template wrote, whether it was appended or started anew.
        assert CODEC.decode(turn.prompt_ids, special=True) == rendered
        bounds = sorted({0, cut, len(ids)})
        spans = [
            WireSpan(epoch=1, step=index * 2 + part, start=start, end=end)
            for part, (start, end) in enumerate(itertools.pairwise(bounds))
        ]
        completion = Completion(ids=ids, logprobs=[-0.1] * len(ids), spans=spans, finish="stop")
        answer = recorder.complete(turn, completion, "s0", "b0")
        sampled += ids
        messages.append({"role": "assistant", "content": answer})
    history = recorder.histories[0]
    prompt = history.ids[: history.mask.index(True)]
    segments = build_segments(recorder.histories, prompt)
    assert len(segments) == rewrites + 1
    group = Group(1, 1, 0, np.asarray(prompt, np.int32), (Attempt(segments=segments),))
    group.validate()
    assert [int(i) for s in segments for i in s.ids[s.mask]] == sampled
    assert segments[0].shares_prompt
    assert all(segment.mask[-1] for segment in segments)


def test_seeds_are_a_documented_pure_function():
    import hashlib

    expected = int.from_bytes(hashlib.sha256(b"7,12,3,0,0").digest()[:8], "big") >> 1
    assert sampling_seed(7, 12, 3, 0) == expected
    assert 0 <= expected < 2**63


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 5), unique=True, min_size=2, max_size=50))
def test_seeds_differ_whenever_anything_differs(keys):
    assert len({sampling_seed(*key) for key in keys}) == len(keys)


def test_long_texts_lose_their_middle():
    assert shorten("short") == "short"
    text = shorten("a" * 5000 + "z", 100)
    assert len(text) <= 100
    assert text.startswith("aaa")
    assert text.endswith("z")
