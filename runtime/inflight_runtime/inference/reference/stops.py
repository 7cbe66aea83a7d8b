"""Text of an answer, and when a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stop_check(tokenizer: Any, stop: list[str]) -> Callable[[list[int]], bool] | None:
    """A function of the ids so far that says whether a stop string has appeared; ``None`` when there are none.

    The tokens that complete the string stay part of the answer: what was sampled is what is trained on.
    """
    wanted = [text for text in stop if text]
    if not wanted:
        return None

    def stopped(ids: list[int]) -> bool:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return any(part in text for part in wanted)

    return stopped


def cut_at_stop(text: str, stop: list[str]) -> str:
    """The text before the first stop string, as OpenAI's format wants it."""
    ends = [text.index(part) for part in stop if part and part in text]
    return text[: min(ends)] if ends else text


class TextStream:
    """Turns a growing list of ids into pieces of text, holding back half characters and half stop strings."""

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max((len(part) for part in stop), default=0)
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        """Text that is certain now."""
        self._ids.append(token)
        text = self._text()
        certain = len(text) - max(0, self._longest - 1)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = min(certain, len(text.rstrip("\N{REPLACEMENT CHARACTER}")))
        return self._take(text, certain)

    def finish(self) -> str:
        """The rest."""
        text = self._text()
        return self._take(text, len(text))

    def _text(self) -> str:
        return cut_at_stop(self._tokenizer.decode(self._ids, skip_special_tokens=True), self._stop)

    def _take(self, text: str, end: int) -> str:
        piece = text[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        return piece
