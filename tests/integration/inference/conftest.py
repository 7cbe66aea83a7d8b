"""One server of each engine for the whole session, and models to send to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.servers import RunningServer, make_config, start_server
from support.tiny_models import MAX_LENGTH, make_tiny_model
from support.trainer_side import TrainerSide, load_hf

ENGINES = ("reference", "vllm")
SPREAD = 0.1
"""Initialisation range at which two random models plainly disagree and float32 still agrees to 1e-5."""


@dataclass
class Models:
    """Three sets of weights of one architecture."""

    directories: list[Path]
    loaded: list[Any]


def make_models(directory: Path, arch: str) -> Models:
    """Tied models that differ in their seed."""
    kv_heads = 1 if arch == "llama" else None
    directories = [
        make_tiny_model(directory / f"{arch}-{seed}", arch, seed=seed, initializer_range=SPREAD, kv_heads=kv_heads)
        for seed in range(4)
    ]
    return Models(directories, [load_hf(path) for path in directories])


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"), "llama")


@dataclass
class Fresh:
    """What a server answered before its first update."""

    status: dict[str, Any]
    generate: tuple[int, Any]


@pytest.fixture(scope="session", params=ENGINES)
def started(
    request: pytest.FixtureRequest, qwen: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Fresh]]:
    directory = tmp_path_factory.mktemp(f"server-{request.param}")
    config = make_config(directory, qwen.directories[0], engine=request.param, server_id=f"{request.param}-0")
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_length": MAX_LENGTH})})
    with start_server(config, directory / "server.log", deadline_s=280) as server:
        fresh = Fresh(
            server.status(), server.call("POST", "/runtime/v1/generate", {"prompt_ids": [1], "max_tokens": 1})
        )
        yield server, fresh


@pytest.fixture
def server(started: tuple[RunningServer, Fresh]) -> RunningServer:
    return started[0]


@pytest.fixture
def fresh(started: tuple[RunningServer, Fresh]) -> Fresh:
    return started[1]


@pytest.fixture
def trainer(server: RunningServer) -> Iterator[TrainerSide]:
    """A trainer that has joined the server under a new epoch."""
    with TrainerSide(server) as side:
        yield side.join()
