"""The inference servers: a StatefulSet, a headless Service that names each of them, and one in front of all."""

from __future__ import annotations

from typing import Final

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.pods import (
    OFFLINE,
    Pod,
    http_probes,
    pod_template,
    role_command,
    role_image,
    role_mounts,
)
from inflight_operator.builders.resources import threads_of
from inflight_operator.builders.wiring import INFERENCE_PORT, Wiring

GRACE_S: Final = 30
"""A server leaves the membership at once; vLLM ends in 6 s at the latest."""
PORT_NAME: Final = "http"


def stateful_set(build: Build, wiring: Wiring) -> Manifest:
    """The servers. They start side by side: none of them needs another one."""
    spec = build.job.spec.inference
    pod = Pod(
        role=names.INFERENCE,
        image=role_image(build, names.INFERENCE, spec.image),
        command=role_command(names.INFERENCE),
        resources=wiring.inference,
        grace_s=GRACE_S,
        mounts=(*role_mounts(build, wiring.config_map, names.INFERENCE), *wiring.model.mounts),
        environment=OFFLINE,
        ports={PORT_NAME: INFERENCE_PORT},
        probes=http_probes(PORT_NAME, build.settings.inference_startup_s),
        threads=threads_of(wiring.inference),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": build.metadata(names.inference(build.name), names.INFERENCE),
        "spec": {
            "replicas": build.servers,
            "serviceName": names.inference_pods(build.name),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": names.selector(build.name, names.INFERENCE)},
            "template": pod_template(build, pod, spec),
        },
    }


def pods_service(build: Build) -> Manifest:
    """A name for every server, also before it is ready: the trainer must reach it to give it its first weights."""
    manifest = service(build)
    manifest["metadata"] = build.metadata(names.inference_pods(build.name), names.INFERENCE)
    manifest["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return manifest


def service(build: Build) -> Manifest:
    """OpenAI-compatible address for evaluation and for people: only servers that have weights stand behind it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build.metadata(names.inference(build.name), names.INFERENCE),
        "spec": {
            "selector": names.selector(build.name, names.INFERENCE),
            "ports": [{"name": PORT_NAME, "port": INFERENCE_PORT, "targetPort": PORT_NAME}],
        },
    }
