from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.config.roles import InferenceConfig, ModelFiles
from inflight_runtime.inference.__main__ import main
from inflight_runtime.inference.vllm_launch import (
    CONFIG_ENV,
    EngineArgsError,
    build_command,
    build_environment,
    exec_server,
    merge_plugins,
)


def make(**changes: Any) -> InferenceConfig:
    settings: dict[str, Any] = {
        "job": "j",
        "server_id": "i0",
        "engine": "vllm",
        "port": 8001,
        "advertise_url": "http://127.0.0.1:8001",
        "coordinator_url": "http://127.0.0.1:2",
        "token_file": Path("/nowhere/token"),
        "model": ModelFiles(path="/models/m", tokenizer="/models/t", max_length=128),
        "served_name": "policy",
        "max_concurrent": 48,
        "cpu_kv_cache_bytes": 4096,
        "threads": 3,
        "seed": 7,
    }
    return InferenceConfig(**(settings | changes))


def flags(**changes: Any) -> dict[str, str]:
    """``--name value`` and ``--name=value`` of the command line by name."""
    words = build_command(make(**changes))[3:]
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name] = f"{found[name]} {word}".strip()
    return found


def test_the_module_is_started_and_not_the_command() -> None:
    assert build_command(make(), python="py")[:3] == ["py", "-m", "inflight_runtime.inference.vllm_server"]


def test_every_setting_of_the_config_is_on_the_command_line() -> None:
    found = flags()
    assert found["--model"] == "/models/m"
    assert found["--tokenizer"] == "/models/t"
    assert found["--served-model-name"] == "policy"
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "8001")
    assert (found["--max-model-len"], found["--max-num-seqs"]) == ("128", "48")
    assert (found["--dtype"], found["--seed"], found["--tensor-parallel-size"]) == ("float32", "7", "1")
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert "--enable-prefix-caching" in found
    assert "--trust-remote-code" not in found
    assert "--trust-remote-code" in flags(
        model=ModelFiles(path="m", tokenizer="m", max_length=8, trust_remote_code=True)
    )


def test_the_cpu_gets_eager_mode_small_blocks_and_its_own_cache_size_and_a_gpu_none_of_it() -> None:
    cpu = flags()
    assert (cpu["--block-size"], cpu["--kv-cache-memory-bytes"]) == ("32", "4096")
    assert "--enforce-eager" in cpu
    assert "--no-enable-chunked-prefill" in cpu
    assert (
        not set(cpu)
        - set(flags(device="cuda"))
        - {
            "--block-size",
            "--kv-cache-memory-bytes",
            "--enforce-eager",
            "--no-enable-chunked-prefill",
        }
    )
    assert "--block-size" not in flags(device="cuda")


def test_engine_args_are_given_in_the_engines_spelling_and_override_ours() -> None:
    found = flags(
        engine_args={
            "max-num-batched-tokens": 1024,
            "block_size": 64,
            "--enable-prefix-caching": False,
            "no-enforce-eager": None,
            "hf-overrides": {"a": 1},
            "allowed-origins": ["x", "y"],
            "chat-template": "{{ a b }}",
        }
    )
    assert found["--max-num-batched-tokens"] == "1024"
    assert found["--block-size"] == "64"
    assert "--no-enable-prefix-caching" in found
    assert "--enable-prefix-caching" not in found
    assert "--no-enforce-eager" in found
    assert "--enforce-eager" not in found
    assert json.loads(found["--hf-overrides"]) == {"a": 1}
    assert found["--allowed-origins"] == "x y"
    assert found["--chat-template"] == "{{ a b }}"


@pytest.mark.parametrize(
    "name", ["model", "--model", "api-key", "api_key", "logprobs_mode", "no-trust-remote-code", "worker-extension-cls"]
)
def test_flags_that_the_contract_stands_on_are_refused_by_name(name: str) -> None:
    with pytest.raises(EngineArgsError, match=rf"engineArgs\.{name}.*remove it"):
        build_command(make(engine_args={name: "x"}))


@pytest.mark.parametrize("args", [{"a b": 1}, {"a=b": 1}, {"--": 1}, {"ok": object()}])
def test_engine_args_that_are_no_flags_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(EngineArgsError, match="engineArgs"):
        build_command(make(engine_args=args))


def test_the_token_travels_by_environment_alone() -> None:
    env = build_environment(make(), Path("c.json"), "s3cret", {})
    assert env["VLLM_API_KEY"] == "s3cret"
    assert not any("s3cret" in word for word in build_command(make()))


def test_the_environment_is_the_users_but_for_what_must_be(tmp_path: Path) -> None:
    model = ModelFiles(path=str(tmp_path), tokenizer="t", max_length=8)
    user = {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "9",
        "OMP_NUM_THREADS": "64",
    }
    env = build_environment(make(model=model), tmp_path / "c.json", "t", user)
    assert env["PATH"] == "/bin"
    assert env[CONFIG_ENV] == str(tmp_path / "c.json")
    assert not {"VLLM_SERVER_DEV_MODE", "VLLM_CPU_KVCACHE_SPACE"} & set(env)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "9"
    assert env["OMP_NUM_THREADS"] == "3"
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_cores_are_not_bound_and_idle_connections_are_kept_unless_the_user_says_so() -> None:
    env = build_environment(make(), Path("c"), "t", {})
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 60
    assert int(env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
    assert "HF_HUB_OFFLINE" not in env  # /models/m is not here


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({}, False),
        ({"engine_args": {"enforce-eager": None}}, False),
        ({"engine_args": {"enforce-eager": False}}, True),
        ({"engine_args": {"no-enforce-eager": None}}, True),
        ({"device": "cuda"}, True),
    ],
)
def test_nothing_is_compiled_on_cpu_unless_the_user_asks_for_it(changes: dict[str, Any], compiles: bool) -> None:
    assert build_environment(make(**changes), Path("c"), "t", {}).get("TORCHDYNAMO_DISABLE") == (
        None if compiles else "1"
    )
    assert build_environment(make(), Path("c"), "t", {"TORCHDYNAMO_DISABLE": "0"})["TORCHDYNAMO_DISABLE"] == "0"


@pytest.mark.parametrize("changes", [{"tensor_parallel": 2}, {"device": "cuda"}])
def test_several_workers_or_a_gpu_keep_their_own_processes(changes: dict[str, Any]) -> None:
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in build_environment(make(**changes), Path("c"), "t", {})


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        ("mine", "mine,inflight"),
        (" mine , other", "mine,other,inflight"),
        ("inflight,mine", "inflight,mine"),
        ("", "inflight"),
        (None, "a,b,inflight"),
    ],
)
def test_our_plugin_is_added_to_those_the_user_wants(own: str | None, merged: str) -> None:
    """Unset means "all" to vLLM: the installed ones must not be lost by setting the variable."""
    assert merge_plugins(own, ["a", "b"]) == merged


def test_the_process_becomes_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *args: seen.append(args))
    (tmp_path / "token").write_text("s3cret\n")
    exec_server(make(token_file=tmp_path / "token"), tmp_path / "c.json")
    (path, command, env) = seen[0]
    assert path == command[0] == sys.executable
    assert env["VLLM_API_KEY"] == "s3cret"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "JSON"),
        ("{}", "server_id"),
        (None, "No such file"),
        (make(engine_args={"port": 1}).model_dump_json(), "config.json"),
    ],
)
def test_a_config_that_cannot_be_started_is_refused_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, word: str
) -> None:
    file = tmp_path / "c.json"
    if content is not None:
        file.write_text(content)
    assert main(["--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("inference server not started")
    assert word in message
    assert "Traceback" not in message
