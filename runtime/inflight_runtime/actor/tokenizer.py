"""The chat template and the tokenizer, without the weight of a deep-learning library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from inflight_runtime.config.roles import ModelFiles


class TokenizerError(ValueError):
    """The model's tokenizer cannot be used; the message says why."""


class TextCodec(Protocol):
    """What the shim needs of a tokenizer."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Put chat messages through the template, ending with the opening of the assistant's turn."""

    def encode(self, text: str) -> list[int]:
        """Tokenise without adding special tokens (the template has written them)."""

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Turn ids into text, with or without special tokens."""


class Tokenizer:
    """A transformers tokenizer as a :class:`TextCodec`."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        self.hf = tokenizer
        self._where = where
        self._backend = getattr(tokenizer, "backend_tokenizer", None)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Put chat messages through the template (see :class:`TextCodec`).

        Raises:
            TokenizerError: there is no template, or it refuses the messages.
        """
        if not self.hf.chat_template:
            raise TokenizerError(
                f"the tokenizer in {self._where} has no chat template: return a string from messages(), "
                "which is sent as it is, or name another spec.model.tokenizer"
            )
        try:
            return str(
                self.hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:
            raise TokenizerError(f"the chat template of {self._where} refused the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokenise without adding special tokens."""
        if self._backend is not None:
            # Six times faster than the wrapper, which builds masks and checks lengths that nobody reads here.
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Turn ids into text."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=not special))
        return str(self.hf.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def load_tokenizer(model: ModelFiles) -> Tokenizer:
    """Load the tokenizer that the model's directory holds.

    ``tokenizer.json`` is loaded as saved, through a class that does not import torch: 80 MB instead of 720 MB for the
    process. Only a model without that file, or with code of its own, takes ``AutoTokenizer``.

    Raises:
        TokenizerError: it cannot be loaded.
    """
    try:
        if (Path(model.tokenizer) / "tokenizer.json").is_file() and not model.trust_remote_code:
            from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes seconds

            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(model.tokenizer), model.tokenizer)
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and imports torch

        loaded = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise TokenizerError(f"model.tokenizer {model.tokenizer!r} cannot be loaded: {error}") from error
    return Tokenizer(loaded, model.tokenizer)
