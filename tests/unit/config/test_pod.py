"""What a role config leaves to the pod, and how the pod fills it in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.api import RLTrainingJob, validate_job
from inflight_runtime.config import pod, render, roles
from inflight_runtime.config.model_files import read_model_facts
from inflight_runtime.config.render import ActorAddress, Addresses, RenderedRun, ServerAddress, render_roles
from inflight_runtime.config.roles import load_role_config

CONFIG = {
    "model_type": "qwen2",
    "max_position_embeddings": 16_384,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
POD = {"INFLIGHT_POD_NAME": "letters-inference-3", "INFLIGHT_POD_IP": "10.0.0.7"}


def make_job(**sections: Any) -> RLTrainingJob:
    spec: dict[str, Any] = {
        "model": {"source": "./model"},
        "environment": {"entrypoint": "environment:SortLetters"},
        "algorithm": {"steps": 10, "seed": 5},
        **sections,
    }
    head = {"apiVersion": "inflight.dev/v1alpha1", "kind": "RLTrainingJob", "metadata": {"name": "letters"}}
    return validate_job({**head, "spec": spec}, "test")


def addresses(model: Path) -> Addresses:
    return Addresses(
        coordinator_host="0.0.0.0",
        coordinator_port=7000,
        coordinator_url="http://letters-coordinator:7000",
        data_dir=Path("/data"),
        token_file=Path("/token"),
        servers=(ServerAddress(pod.NAME, "0.0.0.0", 8000, f"http://{pod.NAME}.letters-inference-pods:8000"),),
        actors=(ActorAddress(pod.NAME, "0.0.0.0", 7001),),
        trainer_host=pod.ADDRESS,
        model_path=str(model),
        tokenizer_path=str(model),
        model=None,
        checkpoint_dir=Path("/checkpoints"),
        log_dir=Path("/logs"),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def rendered(model: Path, **sections: Any) -> RenderedRun:
    return render_roles(make_job(**sections), addresses(model))


def test_a_server_takes_name_address_and_seed_from_its_pod(model: Path) -> None:
    server = pod.complete(rendered(model).inference[0], POD)
    assert server.server_id == "letters-inference-3"
    assert server.advertise_url == "http://letters-inference-3.letters-inference-pods:8000"
    assert server.seed == 5 + 3


def test_an_actor_takes_its_name_and_the_trainer_its_address_from_the_pod(model: Path) -> None:
    run = rendered(model)
    assert pod.complete(run.actors[0], {"INFLIGHT_POD_NAME": "letters-actor-6f7-x2"}).actor_id == "letters-actor-6f7-x2"
    assert pod.complete(run.trainer, POD).weight_sync.bind_host == "10.0.0.7"


@pytest.mark.parametrize("sections", [{}, {"inference": {"engineArgs": {"max-model-len": 9000}}}])
def test_a_pod_comes_to_the_sizes_that_one_machine_comes_to(model: Path, sections: dict[str, Any]) -> None:
    job = make_job(**sections)
    known = render_roles(job, replace(addresses(model), model=read_model_facts(model)))
    left_open = render_roles(job, addresses(model))
    for ours, theirs in zip(
        (left_open.inference[0], left_open.actors[0], left_open.trainer),
        (known.inference[0], known.actors[0], known.trainer),
        strict=True,
    ):
        assert pod.complete(ours, POD) == pod.complete(theirs, POD)


def test_rendering_reads_no_model(tmp_path: Path) -> None:
    run = rendered(tmp_path / "not-there")
    assert (run.inference[0].model.max_length, run.inference[0].cpu_kv_cache_bytes) == (0, 0)
    assert run.trainer.micro_batch_tokens == 0


def test_every_role_reads_a_file_and_completes_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    file = model / "role.json"
    run = rendered(model)
    for config in (run.coordinator, run.inference[0], run.actors[0], run.trainer):
        file.write_text(config.model_dump_json())
        read = load_role_config(type(config), file)
        assert "$(" not in read.model_dump_json()
        assert "max_length" not in read.model_dump_json() or read.model.max_length == 16_384  # type: ignore[attr-defined]


def test_a_variable_that_is_not_set_is_named(model: Path) -> None:
    with pytest.raises(ValueError, match="INFLIGHT_POD_NAME, which is not set"):
        pod.complete(rendered(model).inference[0], {})


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        pod.complete(rendered(tmp_path / "gone").trainer, POD)


def test_text_of_the_user_is_never_expanded(model: Path) -> None:
    sections = {"environment": {"entrypoint": "a:B", "args": {"text": "$(INFLIGHT_POD_NAME)"}}}
    actor = pod.complete(rendered(model, **sections).actors[0], POD)
    assert actor.environment.args == {"text": "$(INFLIGHT_POD_NAME)"}


def test_a_config_of_the_local_executor_passes_through(model: Path) -> None:
    place = replace(
        addresses(model),
        servers=(ServerAddress("inference-7", "127.0.0.1", 1, "http://127.0.0.1:1"),),
        actors=(ActorAddress("actor-0"),),
        trainer_host="127.0.0.1",
        model=read_model_facts(model),
    )
    run = render.render_roles(make_job(), place)
    configs: tuple[roles.RoleModel, ...] = (run.coordinator, run.inference[0], run.actors[0], run.trainer)
    for config in configs:
        assert pod.complete(config, {}) == config
