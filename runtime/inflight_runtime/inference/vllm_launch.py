"""How a vLLM server is started: command line and environment, from the role config.

Always by :mod:`.vllm_server`: the ``vllm`` command does not work in vLLM's CPU distribution.
The bearer token travels by environment and never stands in the command line, where every user of the machine could
read it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from inflight_runtime.config.roles import InferenceConfig

CONFIG_ENV: Final = "INFLIGHT_INFERENCE_CONFIG"
"""Names the role config's file to the plugin."""
PLUGIN_NAME: Final = "inflight"
WORKER_EXTENSION: Final = "inflight_runtime.inference.vllm_plugin.worker.InflightWorkerExtension"
SERVER_MODULE: Final = "inflight_runtime.inference.vllm_server"
KEEP_ALIVE_S: Final = 600
"""vLLM closes idle connections after 5 s; a client that was busy then meets a stale one."""
ONEDNN_CACHED_PRIMITIVES: Final = 256
"""Kernels that oneDNN keeps, one for each layer shape and batch size; its default of 1024 takes 0.3 GB per server."""
CPU_BLOCK_SIZE: Final = 32
"""Smallest KV block the CPU attention takes: the prefix cache works in whole blocks."""

RESERVED_ARGS: Final[Mapping[str, str]] = {
    "model": "spec.model",
    "tokenizer": "spec.model.tokenizer",
    "dtype": "spec.model.dtype",
    "trust-remote-code": "spec.model.trustRemoteCode",
    "max-model-len": "the model's longest sequence",
    "max-num-seqs": "the server's capacity",
    "served-model-name": "the job's name for the model",
    "host": "the address given by the job",
    "port": "the address given by the job",
    "uds": "the address given by the job",
    "api-key": "the job's token",
    "seed": "the job's seed",
    "tensor-parallel-size": "spec.inference.tensorParallel",
    "worker-extension-cls": "in-flight weight updates",
    "worker-cls": "in-flight weight updates",
    "weight-transfer-config": "in-flight weight updates",
    "logprobs-mode": "the logprobs that training needs",
    "data-parallel-size": "weight updates reach one engine per server: raise spec.inference.replicas instead",
    "pipeline-parallel-size": "weight updates reach one stage per server",
    "api-server-count": "weight updates need one API process per server",
    "root-path": "the routes of the inference contract",
    "headless": "the routes of the inference contract",
    "skip-tokenizer-init": "the chat route",
}
"""Engine flags that are ours, and what decides them; everything else may be set or overridden by the user."""

DISCOVERED_GROUPS: Final = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


class EngineArgsError(ValueError):
    """An engine argument that cannot be taken; the message names it, the reason and the remedy."""


def build_command(config: InferenceConfig, *, python: str = sys.executable) -> list[str]:
    """The full command line of the server.

    Raises:
        EngineArgsError: ``config.engine_args`` names a reserved flag or holds a value that is no flag value.
    """
    flags: dict[str, Any] = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer,
        "served-model-name": config.served_name,
        "host": config.host,
        "port": config.port,
        "dtype": config.model.dtype,
        "max-model-len": config.model.max_length,
        "max-num-seqs": config.max_concurrent,
        "tensor-parallel-size": config.tensor_parallel,
        "seed": config.seed,
        # Raw logprobs ignore the temperature; the importance ratio needs those of the sampled distribution.
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": WORKER_EXTENSION,
        "enable-prefix-caching": True,
        "disable-uvicorn-access-log": True,
    }
    if config.model.trust_remote_code:
        flags["trust-remote-code"] = True
    if config.device == "cpu":
        flags |= {
            "enforce-eager": True,
            "block-size": CPU_BLOCK_SIZE,
            "kv-cache-memory-bytes": config.cpu_kv_cache_bytes,
            # A seeded request whose prompt is split over two steps kills the CPU engine (vLLM 0.32 rewinds a generator
            # that cannot be rewound there); see vllm_plugin.salts for those who switch it on.
            "enable-chunked-prefill": False,
        }
    flags = merge_engine_args(flags, config.engine_args)
    return [python, "-m", SERVER_MODULE, *(word for name, value in flags.items() for word in _words(name, value))]


def merge_engine_args(flags: Mapping[str, Any], engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Put the user's engine flags over ours; a negation (``no-x``) replaces ``x`` and the other way round.

    Raises:
        EngineArgsError: a reserved flag, or one that is no flag name.
    """
    merged = dict(flags)
    for raw, value in engine_args.items():
        name = raw.lstrip("-").replace("_", "-")
        opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
        if not name or any(char.isspace() or char == "=" for char in name):
            raise EngineArgsError(f"engineArgs: {raw!r} is not a flag name; write for instance max-num-batched-tokens")
        for taken in (name, opposite):
            # `model.x` sets a part of a structured flag.
            if (reason := RESERVED_ARGS.get(taken.partition(".")[0])) is not None:
                raise EngineArgsError(f"engineArgs.{raw} is set by Inflight ({reason}); remove it")
        merged.pop(opposite, None)
        merged[name] = value
    return merged


def build_environment(
    config: InferenceConfig, config_file: Path, token: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the server.

    Args:
        config: the role config.
        config_file: where it is stored, for the plugin.
        token: the job's bearer token; guards vLLM's own routes.
        environ: what to start from; the user's own choices stand unless the contract needs otherwise.
    """
    env = dict(environ)
    env[CONFIG_ENV] = str(config_file.resolve())
    env["VLLM_API_KEY"] = token
    env["VLLM_PLUGINS"] = merge_plugins(environ.get("VLLM_PLUGINS"))
    env["VLLM_NO_USAGE_STATS"] = "1"
    env.pop("VLLM_SERVER_DEV_MODE", None)  # its routes change weights behind the version's back
    env.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_S))
    if Path(config.model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.device == "cpu":
        env["OMP_NUM_THREADS"] = str(config.threads)
        # It would override the configured cache size, and an empty value kills the worker.
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
        env.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_CACHED_PRIMITIVES))
        # Automatic binding gives every server of a machine the same cores.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if _eager(config):
            # A helper of the sampler is compiled even so: 15 s for the first request, and a C++ compiler needed.
            env.setdefault("TORCHDYNAMO_DISABLE", "1")
        if config.tensor_parallel == 1:
            # Engine and worker in one process: half the start-up time, 0.5 GB less.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env


def merge_plugins(own: str | None, installed: list[str] | None = None) -> str:
    """Value of ``VLLM_PLUGINS``, an allow-list for every plugin group.

    Unset means "all" to vLLM, so the installed ones are named and ours is added; else ours is added to the user's.

    Args:
        own: the user's value, ``None`` when unset.
        installed: names of installed plugins; by default those found in this environment.
    """
    if own is None:
        names = installed_plugins() if installed is None else installed
    else:
        names = [name.strip() for name in own.split(",") if name.strip()]
    return ",".join(dict.fromkeys([*names, PLUGIN_NAME]))


def installed_plugins() -> list[str]:
    """Names of the installed plugins that vLLM loads unless told otherwise."""
    return sorted({point.name for group in DISCOVERED_GROUPS for point in importlib.metadata.entry_points(group=group)})


def exec_server(config: InferenceConfig, config_file: Path) -> NoReturn:
    """Become the server process.

    Raises:
        EngineArgsError: see :func:`build_command`.
        OSError: the token file cannot be read.
    """
    command = build_command(config)
    env = build_environment(config, config_file, config.token_file.read_text().strip(), os.environ)
    sys.stdout.flush()
    os.execve(command[0], command, env)  # noqa: S606


def _eager(config: InferenceConfig) -> bool:
    flags = merge_engine_args({"enforce-eager": True}, config.engine_args)
    return "enforce-eager" in flags and flags["enforce-eager"] is not False


def _words(name: str, value: Any) -> list[str]:
    if value is True or value is None:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, str):
        return [f"--{name}={value}"]
    if isinstance(value, (int, float)):
        return [f"--{name}", str(value)]
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    raise EngineArgsError(f"engineArgs.{name}: {value!r} cannot be given on a command line")
