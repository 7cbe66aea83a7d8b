"""The Job that fetches a model from the hub into the job's model claim, once."""

from __future__ import annotations

import copy
from typing import Any, Final

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.pods import FETCHED_DIR, Mount, Pod, claim, pod_template
from inflight_operator.builders.resources import requirements
from inflight_operator.builders.wiring import FETCHED_MODEL, Wiring

GRACE_S: Final = 10
"""Nothing is lost: the next attempt goes on where this one was."""
RETRIES: Final = 6
SKIPPED: Final = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*")
"""The same weights in other formats: servers and trainer read safetensors."""


def fetch_job(build: Build, wiring: Wiring) -> Manifest:
    """Fetches everything; the roles are started when it has completed, so that none of them sees half a model."""
    commands = [
        _download(hub_id, directory, build.job.spec.model.revision if directory == FETCHED_MODEL else None)
        for directory, hub_id in wiring.model.fetched.items()
    ]
    template = pod_template(build, _pod(build, commands[-1]), None)
    for number, command in enumerate(commands[:-1]):
        # Two containers at once would only share the same line.
        first = copy.deepcopy(template["spec"]["containers"][0])
        first |= {"name": f"{names.MODEL}-{number}", "command": command}
        template["spec"].setdefault("initContainers", []).append(first)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build.metadata(names.model(build.name), names.MODEL),
        "spec": {"backoffLimit": RETRIES, "podReplacementPolicy": "Failed", "template": template},
    }


def _pod(build: Build, command: list[str]) -> Pod:
    return Pod(
        role=names.MODEL,
        # The job's own images need not hold the client of the hub; ours does.
        image=build.settings.image(names.ACTOR),
        command=command,
        resources=requirements(names.MODEL, None),
        grace_s=GRACE_S,
        mounts=(Mount("fetched", FETCHED_DIR, claim(names.model(build.name))),),
        environment=tuple(_hub_token(build)),
        restart_policy="Never",
        shm=False,
    )


def _hub_token(build: Build) -> list[dict[str, Any]]:
    ref = build.job.spec.model.token_secret_ref
    if ref is None:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}]


def _download(hub_id: str, directory: str, revision: str | None) -> list[str]:
    command = ["hf", "download", hub_id, "--local-dir", directory]
    if revision is not None:
        command += ["--revision", revision]
    for pattern in SKIPPED:
        command += ["--exclude", pattern]
    return command
