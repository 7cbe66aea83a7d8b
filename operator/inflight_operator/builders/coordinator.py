"""The coordinator: a StatefulSet of one, and its Service."""

from __future__ import annotations

from typing import Final

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.pods import (
    DATA_DIR,
    Mount,
    Pod,
    claim,
    http_probes,
    pod_template,
    role_command,
    role_image,
    role_mounts,
)
from inflight_operator.builders.resources import requirements
from inflight_operator.builders.wiring import COORDINATOR_PORT, Wiring

GRACE_S: Final = 30
"""Requests under way get 3 s, then the last transactions are written."""
PORT_NAME: Final = "http"


def stateful_set(build: Build, wiring: Wiring) -> Manifest:
    """One coordinator, never two: its StatefulSet makes no second pod while the first may live."""
    spec = build.job.spec.coordinator
    pod = Pod(
        role=names.COORDINATOR,
        image=role_image(build, names.COORDINATOR, None),
        command=role_command(names.COORDINATOR),
        resources=requirements(names.COORDINATOR, spec),
        grace_s=GRACE_S,
        mounts=(
            *role_mounts(build, wiring.config_map, names.COORDINATOR),
            Mount("data", DATA_DIR, claim(names.coordinator(build.name))),
        ),
        ports={PORT_NAME: COORDINATOR_PORT},
        probes=http_probes(PORT_NAME, build.settings.coordinator_startup_s),
        shm=False,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": build.metadata(names.coordinator(build.name), names.COORDINATOR),
        "spec": {
            "replicas": 1,
            "serviceName": names.coordinator(build.name),
            "selector": {"matchLabels": names.selector(build.name, names.COORDINATOR)},
            "template": pod_template(build, pod, spec),
        },
    }


def service(build: Build) -> Manifest:
    """The address that all other roles know."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build.metadata(names.coordinator(build.name), names.COORDINATOR),
        "spec": {
            "selector": names.selector(build.name, names.COORDINATOR),
            "ports": [{"name": PORT_NAME, "port": COORDINATOR_PORT, "targetPort": PORT_NAME}],
        },
    }
