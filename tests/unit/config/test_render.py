"""From a job to the role configs."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.api import JobError, RLTrainingJob, validate_job
from inflight_runtime.api.placement import RESERVED_ENGINE_ARGS
from inflight_runtime.config import render, roles, sizes
from inflight_runtime.config.model_files import ModelFacts, read_model_facts
from inflight_runtime.config.render import LocalLayout, RenderedRun, render_local, write_role_configs
from inflight_runtime.inference import vllm_launch

CONFIG = {
    "model_type": "qwen2",
    "max_position_embeddings": 1024,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}


def make_job(**sections: Any) -> RLTrainingJob:
    spec: dict[str, Any] = {
        "model": {"source": "model"},
        "environment": {"entrypoint": "environment:SortLetters", "args": {"letters": 3}},
        "algorithm": {"steps": 100, "promptsPerStep": 16, "groupSize": 8},
        "sampling": {"maxTokens": 6},
    }
    for name, fields in sections.items():
        spec[name] = {**spec.get(name, {}), **fields}
    data = {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "metadata": {"name": "sort-letters"},
        "spec": spec,
    }
    return validate_job(copy.deepcopy(data), "test")


def render_in(tmp_path: Path, job: RLTrainingJob, **layout: Any) -> RenderedRun:
    model = tmp_path / "job" / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    servers = render.server_count(job)
    ports = list(range(20001, 20001 + servers))
    given = {"job_dir": tmp_path / "job", "token_file": tmp_path / "token", "coordinator_port": 20000}
    return render_local(job, tmp_path / "run", LocalLayout(**{**given, "server_ports": ports, **layout}))


def test_every_process_gets_its_own_address_and_the_same_facts(tmp_path: Path) -> None:
    job = make_job(inference={"replicas": 2}, actors={"replicas": 3})
    run = render_in(tmp_path, job)
    assert [server.server_id for server in run.inference] == ["inference-0", "inference-1"]
    assert [server.advertise_url for server in run.inference] == ["http://127.0.0.1:20001", "http://127.0.0.1:20002"]
    assert [actor.actor_id for actor in run.actors] == ["actor-0", "actor-1", "actor-2"]
    everybody = [*run.inference, *run.actors, run.trainer]
    assert {config.coordinator_url for config in everybody} == {"http://127.0.0.1:20000"}
    assert {config.token_file for config in [*everybody, run.coordinator]} == {tmp_path / "token"}
    assert {config.model.path for config in everybody} == {str(tmp_path / "job" / "model")}
    assert {config.model.max_length for config in everybody} == {1024}
    assert {config.job for config in [*everybody, run.coordinator]} == {"sort-letters"}
    assert {actor.served_name for actor in run.actors} == {server.served_name for server in run.inference}


def test_the_run_directory_holds_all_that_is_written(tmp_path: Path) -> None:
    run = render_in(tmp_path, make_job())
    assert run.coordinator.data_dir == tmp_path / "run" / "coordinator"
    assert run.trainer.checkpoint.dir == tmp_path / "run" / "checkpoints"
    assert run.trainer.log_dir == tmp_path / "run"


def test_the_job_files_directory_is_where_relative_paths_and_the_environment_are(tmp_path: Path) -> None:
    job = make_job(model={"source": "./model", "tokenizer": "../tok"}, checkpoint={"resumeFrom": "../old/step-5"})
    run = render_in(tmp_path, job)
    assert run.actors[0].environment.search_path == (str(tmp_path / "job"),)
    assert run.trainer.model.path == str(tmp_path / "job" / "model")
    assert run.trainer.model.tokenizer == str(tmp_path / "tok")
    assert run.trainer.checkpoint.resume_from == tmp_path / "old" / "step-5"


@pytest.mark.parametrize(
    ("device", "sections", "servers", "trainer"),
    [
        ("cpu", {}, "float32", "float32"),
        ("cuda", {}, "bfloat16", "bfloat16"),
        ("cuda", {"model": {"dtype": "float32"}}, "float32", "float32"),
        ("cuda", {"trainer": {"precision": "float32"}}, "bfloat16", "float32"),
        ("cpu", {"model": {"dtype": "bfloat16"}}, "bfloat16", "float32"),
        ("cpu", {"trainer": {"precision": "bfloat16"}}, "float32", "bfloat16"),
    ],
)
def test_numbers_are_bfloat16_on_gpus_and_float32_on_cpus_unless_the_job_says_otherwise(
    tmp_path: Path, device: str, sections: dict[str, Any], servers: str, trainer: str
) -> None:
    run = render_in(tmp_path, make_job(**sections), device=device)
    assert (run.inference[0].model.dtype, run.trainer.model.dtype) == (servers, trainer)
    assert run.trainer.weight_sync.dtype == servers
    size = run.inference[0].cpu_kv_cache_bytes
    assert size == sizes.kv_cache_bytes(ModelFacts(1024, 2, 1, 32), run.inference[0].model.dtype, 1024, 64)


def test_every_setting_reaches_its_role(tmp_path: Path) -> None:
    job = make_job(
        model={"trustRemoteCode": True},
        environment={
            "overlongPrompt": "fail",
            "rolloutTimeoutSeconds": 11.0,
            "rewardTimeoutSeconds": 12.0,
            "attemptRetries": 3,
            "maxConsecutiveFailures": 4,
        },
        algorithm={
            "maxStaleness": 2,
            "overAge": "mask",
            "zeroVariance": "refill",
            "seed": 7,
            "shuffle": False,
            "loss": {"kind": "ppo", "clipLow": 0.1, "clipHigh": 0.3, "entropyBonus": 0.01, "normalization": "constant"},
            "advantage": {"baseline": "mean", "divideByStd": True},
        },
        sampling={"temperature": 0.7, "stop": ["\n"]},
        weightSync={"transport": "gloo", "kvCache": "recompute", "intervalSteps": 3, "deadlineSeconds": 5.0},
        inference={"maxConcurrent": 16, "engineArgs": {"max-model-len": 64, "kv-cache-memory-bytes": 9999}},
        actors={"concurrency": 5},
        trainer={
            "optimizer": {
                "learningRate": 5e-4,
                "betas": [0.9, 0.99],
                "eps": 1e-7,
                "weightDecay": 0.0,
                "gradClipNorm": None,
                "schedule": "cosine",
                "warmupSteps": 2,
            },
            "microBatchTokens": 500,
            "engine": "deepspeed",
            "zeroStage": 3,
            "offloadOptimizer": True,
            "activationCheckpointing": True,
        },
        evaluation={"everySteps": 10, "prompts": 20, "attempts": 2},
        checkpoint={"everySteps": 20, "keep": 2},
        logging={"rolloutsPerStep": 4},
    )
    run = render_in(tmp_path, job, device="cuda", server_threads=2, trainer_threads=3)
    coordinator, server, actor, trainer = run.coordinator, run.inference[0], run.actors[0], run.trainer
    assert (coordinator.steps, coordinator.groups_per_step, coordinator.group_size) == (100, 16, 8)
    assert (coordinator.max_staleness, coordinator.over_age, coordinator.zero_variance) == (2, "mask", "refill")
    assert (coordinator.shuffle, coordinator.seed) == (False, 7)
    assert coordinator.evaluation == roles.Evaluation(every_steps=10, prompts=20, attempts=2)
    assert (server.kv_cache, server.max_concurrent, server.device, server.threads) == ("recompute", 16, "cuda", 2)
    assert server.update_deadline_s == 5
    assert server.model.max_length == 64
    assert server.engine_args == {"kv-cache-memory-bytes": 9999}
    assert actor.environment == roles.EnvironmentSpec(
        entrypoint="environment:SortLetters",
        args={"letters": 3},
        search_path=(str(tmp_path / "job"),),
        rollout_timeout_s=11,
        reward_timeout_s=12,
        attempt_retries=3,
        max_consecutive_failures=4,
        overlong_prompt="fail",
    )
    assert actor.sampling == roles.Sampling(temperature=0.7, max_tokens=6, stop=("\n",), seed=7)
    assert (actor.concurrency, actor.group_size, actor.model.trust_remote_code) == (5, 8, True)
    assert trainer.loss == roles.LossConfig(
        kind="ppo", is_cap=None, clip_low=0.1, clip_high=0.3, entropy_bonus=0.01, normalization="constant"
    )
    assert trainer.advantage == roles.AdvantageConfig(baseline="mean", divide_by_std=True)
    assert trainer.optimizer == roles.OptimizerConfig(
        learning_rate=5e-4,
        betas=(0.9, 0.99),
        eps=1e-7,
        weight_decay=0.0,
        grad_clip_norm=None,
        schedule="cosine",
        warmup_steps=2,
    )
    assert trainer.weight_sync.model_dump(include={"transport", "interval_steps", "deadline_s", "bind_host"}) == {
        "transport": "gloo",
        "interval_steps": 3,
        "deadline_s": 5.0,
        "bind_host": "127.0.0.1",
    }
    assert (trainer.checkpoint.every_steps, trainer.checkpoint.keep) == (20, 2)
    assert (trainer.temperature, trainer.max_tokens, trainer.micro_batch_tokens) == (0.7, 6, 500)
    assert (trainer.engine, trainer.zero_stage) == ("deepspeed", 3)
    assert (trainer.offload_optimizer, trainer.activation_checkpointing) == (True, True)
    assert (trainer.device, trainer.threads, trainer.rollouts_per_step, trainer.over_age) == ("cuda", 3, 4, "mask")


def test_a_job_that_says_little_gets_the_roles_own_defaults(tmp_path: Path) -> None:
    trainer = render_in(tmp_path, make_job()).trainer
    assert trainer.loss == roles.LossConfig()
    assert trainer.advantage == roles.AdvantageConfig()
    assert trainer.optimizer == roles.OptimizerConfig()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 8),  # 64 sequences are 8 groups
        ({"inference": {"replicas": 2}}, 16),
        ({"inference": {"maxConcurrent": 65}}, 9),
        ({"inference": {"replicas": 4}, "algorithm": {"maxStaleness": 0}}, 16),  # no more than admission lets out
        ({"inference": {"replicas": 2}, "actors": {"replicas": 3}}, 6),
        ({"inference": {"maxConcurrent": 8}, "actors": {"replicas": 3}}, 1),
        ({"actors": {"concurrency": 3}}, 3),
    ],
)
def test_actors_keep_the_servers_full(sections: dict[str, Any], expected: int) -> None:
    job = make_job()
    spec = {name: {**job.to_wire()["spec"].get(name, {}), **fields} for name, fields in sections.items()}
    assert render.actor_concurrency(make_job(**spec)) == expected


@pytest.mark.parametrize(
    ("sections", "max_length", "expected"),
    [
        ({}, 1024, 8192),
        ({}, 32768, 32768),
        ({"trainer": {"microBatchTokens": 100}}, 1024, 100),
    ],
)
def test_a_micro_batch_holds_at_least_one_sequence(sections: dict[str, Any], max_length: int, expected: int) -> None:
    assert render.micro_batch_tokens(make_job(**sections), max_length) == expected


facts = st.builds(
    ModelFacts,
    max_length=st.integers(8, 131_072),
    layers=st.integers(1, 100),
    kv_heads=st.integers(1, 32),
    head_dim=st.sampled_from([32, 64, 128]),
)


@given(facts, st.integers(1, 512))
def test_the_kv_cache_of_a_cpu_server_holds_one_sequence_and_stays_bounded(model: ModelFacts, concurrent: int) -> None:
    job = make_job(inference={"maxConcurrent": concurrent})
    size = render.cpu_kv_cache_bytes(job, model, "float32")
    one = 2 * model.layers * model.kv_heads * model.head_dim * 4 * model.max_length
    assert size >= one
    assert sizes.MIN_KV_BYTES <= size <= max(sizes.MAX_KV_BYTES, 2 * one + 32 * 2 * 4 * 100 * 32 * 128)


def test_written_configs_are_read_back_by_the_roles(tmp_path: Path) -> None:
    run = render_in(tmp_path, make_job(inference={"replicas": 2}, evaluation={"everySteps": 1, "prompts": 1}))
    files = write_role_configs(run, tmp_path / "run" / "config")
    assert set(files) == {"coordinator", "inference-0", "inference-1", "actor-0", "trainer"}
    assert {path.name for path in (tmp_path / "run" / "config").iterdir()} == {f"{name}.json" for name in files}
    assert roles.load_role_config(roles.CoordinatorConfig, files["coordinator"]) == run.coordinator
    assert roles.load_role_config(roles.InferenceConfig, files["inference-1"]) == run.inference[1]
    assert roles.load_role_config(roles.ActorConfig, files["actor-0"]) == run.actors[0]
    assert roles.load_role_config(roles.TrainerConfig, files["trainer"]) == run.trainer


def test_the_same_core_serves_a_pod(tmp_path: Path) -> None:
    addresses = render.Addresses(
        coordinator_host="0.0.0.0",
        coordinator_port=8000,
        coordinator_url="http://sort-letters-coordinator:8000",
        data_dir=Path("/data"),
        token_file=Path("/etc/inflight/token"),
        servers=tuple(
            render.ServerAddress(f"sort-letters-i-{n}", "0.0.0.0", 8000, f"http://sort-letters-i-{n}.x:8000")
            for n in range(3)
        ),
        actors=(render.ActorAddress("actor", "0.0.0.0", 8080),),
        trainer_host="10.0.0.7",
        model_path="/model",
        tokenizer_path="/model",
        model=ModelFacts(4096, 2, 1, 32),
        checkpoint_dir=Path("/checkpoints"),
        log_dir=Path("/checkpoints/logs"),
        device="cuda",
    )
    run = render.render_roles(make_job(), addresses)
    assert run.inference[2].advertise_url == "http://sort-letters-i-2.x:8000"
    assert (run.coordinator.lease_ttl_s, run.coordinator.member_ttl_s) == (60.0, 10.0)
    assert run.trainer.weight_sync.bind_host == "10.0.0.7"
    assert run.actors[0].health_port == 8080
    local = render_in(tmp_path, make_job())
    assert (local.coordinator.lease_ttl_s, local.coordinator.member_ttl_s) == (20.0, 5.0)
    assert set(dataclasses.asdict(local)) == set(dataclasses.asdict(run))


def test_a_layout_without_enough_ports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 servers and 1 actors do not fit"):
        render_in(tmp_path, make_job(inference={"replicas": 2}), server_ports=[20001])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ModelFacts(1024, 2, 1, 32)),
        ({"head_dim": 128}, ModelFacts(1024, 2, 1, 128)),
        ({"num_key_value_heads": None}, ModelFacts(1024, 2, 2, 32)),
        ({"text_config": {"max_position_embeddings": 99, "head_dim": 16}}, ModelFacts(99, 2, 1, 16)),
        ({"max_position_embeddings": None, "n_positions": 512}, ModelFacts(512, 2, 1, 32)),
    ],
)
def test_a_models_numbers_are_read_from_its_config(
    tmp_path: Path, change: dict[str, Any], expected: ModelFacts
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert read_model_facts(tmp_path) == expected


def test_the_tokenizer_may_shorten_the_longest_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for limit, expected in [(512, 512), (10**30, 1024), (None, 1024)]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
        assert read_model_facts(tmp_path).max_length == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "does not give max_position_embeddings, num_hidden_layers, num_attention_heads, hidden_size"),
        ("[]", "does not give max_position_embeddings"),
        ("{", "config.json cannot be read"),
    ],
)
def test_a_config_without_the_numbers_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JobError, match=r"spec\.model\.source") as caught:
        read_model_facts(tmp_path)
    assert words in str(caught.value)


def test_a_rendered_server_is_a_command_line_that_vllm_launch_takes(tmp_path: Path) -> None:
    job = make_job(inference={"engineArgs": {"max-model-len": 128, "kv-cache-memory-bytes": 1000, "block-size": 64}})
    command = " ".join(vllm_launch.build_command(render_in(tmp_path, job).inference[0]))
    for flags in ("--max-model-len 128", "--kv-cache-memory-bytes 1000", "--block-size 64"):
        assert command.count(flags.split()[0]) == command.count(flags) == 1


def test_every_flag_that_the_launcher_refuses_is_refused_in_the_job() -> None:
    ours = set(RESERVED_ENGINE_ARGS) | {"max-model-len"}  # the job's own spelling for a shorter longest sequence
    assert set(vllm_launch.RESERVED_ARGS) <= ours


@pytest.mark.parametrize("off", [0, None])
def test_no_cap_and_no_clipping_can_be_asked_for_in_two_ways(tmp_path: Path, off: int | None) -> None:
    # Plain kubectl apply drops nulls, so that there must be another one.
    job = make_job(algorithm={"loss": {"isCap": off}}, trainer={"optimizer": {"gradClipNorm": off}})
    trainer = render_in(tmp_path, job).trainer
    assert (trainer.loss.is_cap, trainer.optimizer.grad_clip_norm) == (None, None)
