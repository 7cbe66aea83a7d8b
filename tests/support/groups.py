"""Hypothesis strategies and small builders for rollouts."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from inflight_runtime.types import Attempt, Group, Segment, Span, make_segment


@st.composite
def segments(draw: st.DrawFn, *, max_tokens: int = 12) -> Segment:
    """A valid segment: mask runs tiled by one or more version spans each."""
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=max_tokens).filter(any))
    shares_prompt = draw(st.booleans()) or mask[0]
    count = len(mask)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    logprobs = [draw(st.floats(-50, 0, width=32)) if sampled else 0.0 for sampled in mask]
    spans: list[Span] = []
    step = draw(st.integers(0, 5))
    start = 0
    while start < count:
        if not mask[start]:
            start += 1
            continue
        end = start + 1
        while end < count and mask[end] and draw(st.booleans()):
            end += 1
        spans.append(Span(1, step, start, end, "inference-0", "boot"))
        step += draw(st.integers(0, 2))
        start = end
    return make_segment(ids, mask, logprobs, spans, shares_prompt=shares_prompt)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """A valid attempt, survived or failed."""
    if draw(st.booleans()) and draw(st.booleans()):
        return Attempt(status="failed", error=draw(st.text(max_size=20)), finish="error")
    return Attempt(
        segments=tuple(draw(st.lists(segments(), min_size=1, max_size=3))),
        reward=draw(st.floats(-10, 10, allow_nan=False)),
        parts=draw(st.dictionaries(st.sampled_from(["exact", "format"]), st.floats(0, 1), max_size=2)),
        finish=draw(st.sampled_from(["stop", "length"])),
        text=draw(st.text(max_size=20)),
    )


@st.composite
def groups(draw: st.DrawFn, *, max_attempts: int = 4) -> Group:
    """A valid group."""
    return Group(
        group_id=draw(st.integers(0, 10**9)),
        fence=draw(st.integers(0, 100)),
        problem_index=draw(st.integers(0, 10**9)),
        prompt_ids=np.asarray(draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8)), dtype=np.int32),
        attempts=tuple(draw(st.lists(attempts(), min_size=1, max_size=max_attempts))),
        prompt_text=draw(st.text(max_size=20)),
    )
