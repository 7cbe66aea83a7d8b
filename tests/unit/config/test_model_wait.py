"""A role waits for a model that is still on its way to its claim."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight_runtime.config.model_wait import wait_for_model
from inflight_runtime.config.roles import ModelFiles
from support.tiny_models import make_tiny_model


class Time:
    """Passes only while somebody sleeps; before each second something may happen."""

    def __init__(self, *happens: Callable[[], object]) -> None:
        self.now = 0.0
        self._happens = list(happens)

    def sleep(self, seconds: float) -> None:
        if self._happens:
            self._happens.pop(0)()
        self.now += seconds

    def clock(self) -> float:
        return self.now


def files(model: Path, wait_s: float) -> ModelFiles:
    return ModelFiles(path=str(model), tokenizer=str(model), max_length=64, wait_s=wait_s)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory)
    return directory


def test_a_model_that_is_there_costs_no_time(whole: Path) -> None:
    time = Time()
    wait_for_model(files(whole, 100.0), sleep=time.sleep, clock=time.clock)
    assert time.now == 0


def test_a_role_starts_when_the_last_byte_of_the_model_is_there(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    weights = (whole / "model.safetensors").read_bytes()

    def half() -> None:
        shutil.copytree(whole, model)
        (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])

    time = Time(
        half,
        lambda: (model / "tokenizer.json").rename(model / "elsewhere"),
        lambda: (model / "model.safetensors").write_bytes(weights),
        lambda: (model / "elsewhere").rename(model / "tokenizer.json"),
    )
    wait_for_model(files(model, 100.0), sleep=time.sleep, clock=time.clock)
    assert time.now == 4


def test_a_model_that_never_comes_ends_the_wait_with_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=r"not whole after 70 s: config\.json"):
        wait_for_model(files(tmp_path / "no", 70.0), sleep=time.sleep, clock=time.clock)
    assert len(caplog.records) == 3


def test_where_nobody_was_asked_to_wait_nobody_waits(tmp_path: Path) -> None:
    time = Time()
    wait_for_model(files(tmp_path / "no", 0.0), sleep=time.sleep, clock=time.clock)
    assert time.now == 0
