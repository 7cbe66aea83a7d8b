"""Which tensors a model directory holds, read from its safetensors headers: what an update must bring.

An engine fuses and renames parameters, so the checkpoint's own names are what a snapshot is checked against, before
generation is paused and before a byte is sent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inflight_runtime.protocol import TensorSpec

INDEX_NAME: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""
DERIVED_SUFFIXES: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old checkpoints carry and models compute."""
LM_HEAD: Final = "lm_head.weight"
DTYPES: Final = frozenset({"float32", "bfloat16", "float16", "float64"})
"""What a model can take a copy of; anything else would fail in the middle of the commit."""
SHOWN: Final = 5


class UnknownCheckpointError(ValueError):
    """The model directory cannot be read as a safetensors checkpoint; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """What an update must bring.

    Attributes:
        required: shape by name.
        optional: shape by name, accepted and not asked for (a tied output head, derived buffers).
    """

    required: Mapping[str, tuple[int, ...]]
    optional: Mapping[str, tuple[int, ...]]

    def problem(self, tensors: Iterable[TensorSpec]) -> str:
        """What is wrong with the announced tensors; empty when they fit."""
        announced: dict[str, tuple[int, ...]] = {}
        for tensor in tensors:
            if tensor.name in announced:
                return f"tensor {tensor.name!r} is announced twice"
            if tensor.dtype not in DTYPES:
                return f"{tensor.name} has dtype {tensor.dtype!r}; expected one of {', '.join(sorted(DTYPES))}"
            announced[tensor.name] = tuple(tensor.shape)
        known = {**self.optional, **self.required}
        if unknown := [name for name in announced if name not in known]:
            return f"unknown parameters: {_some(unknown)}"
        if missing := [name for name in self.required if name not in announced]:
            return f"missing parameters: {_some(missing)}"
        wrong = [
            f"{name} has shape {list(shape)}, the model {list(known[name])}"
            for name, shape in announced.items()
            if known[name] and shape != known[name]
        ]
        return f"wrong shapes: {_some(wrong)}" if wrong else ""


def read_expected_tensors(directory: Path) -> ExpectedTensors:
    """Read the names and shapes of a Hugging Face checkpoint.

    Raises:
        UnknownCheckpointError: there is no readable ``config.json`` or no readable safetensors file.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnknownCheckpointError(f"{directory}: config.json cannot be read ({error}); is it a model?") from error
    index = directory / INDEX_NAME
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnknownCheckpointError(
            f"{directory}: no safetensors file; write the model with save_pretrained(safe_serialization=True)"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(read_header(file))
    return split_expected(shapes, tied=_tied(config))


def split_expected(shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> ExpectedTensors:
    """Tell required tensors from optional ones.

    Args:
        shapes: shape by checkpoint name.
        tied: the output head is the input embedding, whether or not the checkpoint holds it twice.
    """
    optional = {name: shape for name, shape in shapes.items() if name.endswith(DERIVED_SUFFIXES)}
    if tied:
        # An empty shape is not compared: the checkpoint may not hold the head at all.
        optional[LM_HEAD] = shapes.get(LM_HEAD, ())
    return ExpectedTensors({name: shape for name, shape in shapes.items() if name not in optional}, optional)


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name in one safetensors file: 8 bytes of length (little endian), then a JSON header.

    Raises:
        UnknownCheckpointError: it is not such a file.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise UnknownCheckpointError(f"{file}: header of {length} bytes; not a safetensors file")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise UnknownCheckpointError(f"{file}: not a readable safetensors file ({error})") from error
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _tied(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config", config)
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
