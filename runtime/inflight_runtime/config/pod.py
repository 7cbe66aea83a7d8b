"""What a role config for a pod leaves open, and its completion inside the pod.

All pods of a role read one file, and whoever renders it has not seen the model. So the file names the pod's own name
and address by placeholders, in Kubernetes' spelling, and says 0 where the model's files decide. A config of the local
executor leaves nothing open and passes through unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inflight_runtime.api import JobError
from inflight_runtime.config import roles
from inflight_runtime.config.model_files import ModelFacts, read_model_facts
from inflight_runtime.config.model_wait import wait_for_model
from inflight_runtime.config.sizes import default_micro_batch_tokens, kv_cache_bytes

NAME_VARIABLE: Final = "INFLIGHT_POD_NAME"
ADDRESS_VARIABLE: Final = "INFLIGHT_POD_IP"
"""Environment variables of a pod, from the downward API."""
NAME: Final = f"$({NAME_VARIABLE})"
"""Stands for the pod's name in ``server_id``, ``advertise_url`` and ``actor_id``."""
ADDRESS: Final = f"$({ADDRESS_VARIABLE})"
"""Stands for the pod's address in ``weight_sync.bind_host``."""
FROM_MODEL: Final = 0
"""Stands for what the model's files decide: ``max_length``, ``cpu_kv_cache_bytes``, ``micro_batch_tokens``."""
_PLACEHOLDER: Final = re.compile(rf"\$\(({NAME_VARIABLE}|{ADDRESS_VARIABLE})\)")


def complete(config: roles.RoleT, environ: Mapping[str, str]) -> roles.RoleT:
    """The config with everything filled in that was left to the pod.

    Args:
        config: as it was rendered.
        environ: the process's environment, with the two variables where the config asks for them.

    Raises:
        ValueError: a variable is not set, or the model's files are missing (after a wait, where the config asks for
            one) or do not tell what is asked of them.
    """
    changes: dict[str, Any] = {}
    if isinstance(config, roles.InferenceConfig | roles.ActorConfig | roles.TrainerConfig):
        wait_for_model(config.model)
    if isinstance(config, roles.InferenceConfig):
        changes = _server(config, environ)
    elif isinstance(config, roles.ActorConfig):
        changes = {"actor_id": _expand(config.actor_id, environ), "model": _model(config.model)}
    elif isinstance(config, roles.TrainerConfig):
        changes = _trainer(config, environ)
    return config.model_copy(update=changes) if changes else config


def _server(config: roles.InferenceConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "server_id": _expand(config.server_id, environ),
        "advertise_url": _expand(config.advertise_url, environ),
        "model": _model(config.model),
    }
    if changes["server_id"] != config.server_id:
        # Servers draw from seeds of their own, so that two of them never give the same answers to one prompt.
        changes["seed"] = config.seed + _ordinal(changes["server_id"])
    if config.cpu_kv_cache_bytes == FROM_MODEL:
        changes["cpu_kv_cache_bytes"] = kv_cache_bytes(
            _facts(config.model), config.model.dtype, changes["model"].max_length, config.max_concurrent
        )
    return changes


def _trainer(config: roles.TrainerConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    model, sync = _model(config.model), config.weight_sync
    changes: dict[str, Any] = {
        "model": model,
        "weight_sync": sync.model_copy(update={"bind_host": _expand(sync.bind_host, environ)}),
    }
    if config.micro_batch_tokens == FROM_MODEL:
        changes["micro_batch_tokens"] = default_micro_batch_tokens(model.max_length)
    return changes


def _model(model: roles.ModelFiles) -> roles.ModelFiles:
    if model.max_length != FROM_MODEL:
        return model
    return model.model_copy(update={"max_length": _facts(model).max_length})


def _facts(model: roles.ModelFiles) -> ModelFacts:
    try:
        return read_model_facts(Path(model.path), Path(model.tokenizer))
    except JobError as error:
        raise ValueError(str(error)) from error


def _expand(text: str, environ: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        if not environ.get(found[1]):
            raise ValueError(f"{text!r} asks for the environment variable {found[1]}, which is not set")
        return environ[found[1]]

    return _PLACEHOLDER.sub(value, text)


def _ordinal(pod_name: str) -> int:
    """The number at the end of a StatefulSet pod's name."""
    number = pod_name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
