"""What a model's directory tells without loading the model: its config's numbers, and whether its files are there."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from inflight_runtime.api import JobError, Problem, show

_LENGTH_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LFS_MARK: Final = b"version https://git-lfs"
_SOURCE: Final = "spec.model.source"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Numbers of a model's config.json.

    Attributes:
        max_length: longest sequence in tokens.
        layers: transformer layers.
        kv_heads: heads of keys and values.
        head_dim: size of a head.
    """

    max_length: int
    layers: int
    kv_heads: int
    head_dim: int


def read_model_facts(directory: Path, tokenizer: Path | None = None) -> ModelFacts:
    """Read the config of the model in ``directory``.

    Args:
        directory: the model.
        tokenizer: directory of its tokenizer, whose ``model_max_length`` may shorten the longest sequence; by default
            the model's own.

    Raises:
        JobError: there is none, or it lacks a number that is needed.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = Problem(
            _SOURCE, show(str(directory)), f"config.json cannot be read: {error}", "give the directory of a model"
        )
        raise JobError([problem]) from error
    facts = facts_of_config(config if isinstance(config, dict) else {}, directory)
    limit = _tokenizer_limit(tokenizer or directory)
    return facts if limit is None or limit >= facts.max_length else replace(facts, max_length=limit)


def facts_of_config(config: dict[str, Any], directory: Path) -> ModelFacts:
    """Take the facts out of a parsed config.json.

    Raises:
        JobError: a number that is needed is missing.
    """
    # Models of text and images keep the language model's numbers one level down.
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config

    def number(*keys: str) -> int | None:
        values = (text.get(key, config.get(key)) for key in keys)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    max_length = number(*_LENGTH_KEYS)
    hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head")
    layers = number("num_hidden_layers", "n_layer")
    head_dim = number("head_dim") or (hidden // heads if hidden and heads else None)
    wanted = {
        "max_position_embeddings": max_length,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": head_dim,
    }
    if max_length is None or layers is None or heads is None or head_dim is None:
        missing = ", ".join(name for name, value in wanted.items() if value is None)
        reason = f"config.json does not give {missing}"
        remedy = "give a causal language model in Hugging Face format"
        raise JobError([Problem(_SOURCE, show(str(directory)), reason, remedy)])
    return ModelFacts(max_length, layers, number("num_key_value_heads") or heads, head_dim)


def _tokenizer_limit(directory: Path) -> int | None:
    # vLLM takes the smaller of the two and refuses to start with a longer --max-model-len.
    try:
        limit = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(limit) if isinstance(limit, int | float) and limit >= 1 else None


def missing_from_model(directory: Path) -> list[str]:
    """What keeps ``directory`` from being a model, in words; empty when it is one (the tokenizer aside)."""
    if not (directory / "config.json").is_file():
        return ["config.json"]
    missing: list[str] = []
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "model_type" not in config:
            missing.append("a config.json with a model_type")
    except (OSError, ValueError) as error:
        missing.append(f"a readable config.json ({error})")
    return missing + _missing_weights(directory)


def missing_from_tokenizer(directory: Path) -> list[str]:
    """What keeps ``directory`` from being a tokenizer, in words."""
    found = [name for name in _VOCABULARIES if (directory / name).is_file()]
    if not found:
        return [f"a tokenizer ({', '.join(_VOCABULARIES[:3])}, ...)"]
    return [f"the content of {name} (it is a Git LFS pointer)" for name in found if _is_lfs_pointer(directory / name)]


def _missing_weights(directory: Path) -> list[str]:
    index = next((directory / name for name in _INDEXES if (directory / name).is_file()), None)
    if index is not None:
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [f"a readable {index.name}"]
    else:
        shards = sorted(
            path.name
            for pattern in ("*.safetensors", "pytorch_model*.bin")
            for path in directory.glob(pattern)
            if not path.name.startswith("adapter_")
        )
        if not shards:
            return [_no_weights(directory)]
    gone = [name for name in shards if not (directory / name).is_file()]
    if gone:
        return [
            f"{len(gone)} of {len(shards)} weight files that {index.name if index else 'it'} lists ({gone[0]}, ...)"
        ]
    return [f"the content of {name} ({fault})" for name in shards if (fault := _weights_fault(directory / name))]


def _weights_fault(path: Path) -> str:
    """What is wrong with a weight file, as far as its size and the header of a safetensors file tell."""
    if _is_lfs_pointer(path):
        return "it is a Git LFS pointer"
    size = path.stat().st_size
    if size == 0:
        return "it is empty"
    if path.suffix != ".safetensors":
        return ""
    # Format: 8 bytes with the header's length, a JSON header, then the tensors, whose ends the header gives.
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                return "it is cut off"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "it is no safetensors file"
    whole = 8 + length + max(ends, default=0)
    return f"it is cut off: {size} of {whole} bytes" if size < whole else ""


def _no_weights(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return "weights (model.safetensors); it is a LoRA adapter, merge it into its base model first"
    if any(directory.glob("*.gguf")):
        return "weights (model.safetensors); it has a GGUF file, convert that first"
    return "weights (model.safetensors)"


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_MARK)) == _LFS_MARK
    except OSError:
        return False
