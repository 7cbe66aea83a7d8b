from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inflight_runtime.inference.checkpoint_names import (
    INDEX_NAME,
    UnknownCheckpointError,
    read_expected_tensors,
    split_expected,
)
from inflight_runtime.protocol import TensorSpec
from support.tiny_models import make_tiny_model

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "lm_head.weight": (5, 3)}


def specs(shapes: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype="float32", shape=list(shape), digest="") for name, shape in shapes.items()]


def write(directory: Path, config: dict[str, Any], files: dict[str, dict[str, tuple[int, ...]]]) -> None:
    directory.joinpath("config.json").write_text(json.dumps(config))
    for file, shapes in files.items():
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / file, {"format": "pt"})


def test_names_and_shapes_are_read_from_one_file(tmp_path: Path) -> None:
    write(tmp_path, {}, {"model.safetensors": SHAPES})
    expected = read_expected_tensors(tmp_path)
    assert expected.required == SHAPES
    assert expected.optional == {}


def test_and_from_the_shards_that_an_index_names(tmp_path: Path) -> None:
    write(tmp_path, {}, {"one.safetensors": {"a": (1,)}, "two.safetensors": {"b": (2,)}, "stray.safetensors": SHAPES})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert read_expected_tensors(tmp_path).required == {"a": (1,), "b": (2,)}


@pytest.mark.parametrize("tied", [True, False])
def test_a_real_checkpoint_asks_for_its_head_only_when_it_is_not_tied(tmp_path: Path, tied: bool) -> None:
    expected = read_expected_tensors(make_tiny_model(tmp_path, "qwen2", tied=tied))
    assert ("lm_head.weight" in expected.required) is not tied
    assert ("lm_head.weight" in expected.optional) is tied
    assert expected.problem(specs(dict(expected.required))) == ""


def test_what_fits_has_no_problem() -> None:
    expected = split_expected({**SHAPES, "x.rotary_emb.inv_freq": (8,)}, tied=True)
    body = {"a.weight": (2, 3), "b.weight": (4,)}
    assert expected.problem(specs(body)) == ""
    assert expected.problem(specs({**body, "lm_head.weight": (5, 3)})) == ""


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"a.weight": (2, 3)}, "missing parameters: b.weight, lm_head.weight"),
        ({**SHAPES, "c": (1,)}, "unknown parameters: c"),
        ({**SHAPES, "b.weight": (5,)}, "b.weight has shape [5], the model [4]"),
        ({**SHAPES, **{f"u{i}": (1,) for i in range(7)}}, "u4 and 2 more"),
    ],
)
def test_a_problem_names_the_parameters(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    assert words in split_expected(SHAPES, tied=False).problem(specs(shapes))


def test_a_name_stands_once() -> None:
    assert "twice" in split_expected(SHAPES, tied=False).problem(specs(SHAPES) + specs(SHAPES))


@pytest.mark.parametrize("dtype", ["int8", "complex64", "bits8", "no such"])
def test_only_floating_point_can_be_loaded(dtype: str) -> None:
    announced = [spec.model_copy(update={"dtype": dtype}) for spec in specs(SHAPES)]
    assert f"a.weight has dtype '{dtype}'" in split_expected(SHAPES, tied=False).problem(announced)


@pytest.mark.parametrize("broken", ["nothing", "no weights", "short", "garbage", "huge header"])
def test_a_directory_that_is_no_checkpoint_is_refused_with_its_path(tmp_path: Path, broken: str) -> None:
    if broken != "nothing":
        (tmp_path / "config.json").write_text("{}")
    content = {"short": b"abc", "garbage": b"\x05" + bytes(7) + b"hello", "huge header": b"\xff" * 16}.get(broken)
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnknownCheckpointError, match=str(tmp_path)):
        read_expected_tensors(tmp_path)
