"""The actors: a Deployment."""

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
from inflight_operator.builders.resources import requirements
from inflight_operator.builders.wiring import ACTOR_PORT, Wiring

GRACE_S: Final = 30
"""Leases are handed back within 3 s; running rollouts get 2 s to end."""
PORT_NAME: Final = "health"


def deployment(build: Build, wiring: Wiring) -> Manifest:
    """The actors; they hold nothing that another one could not take over."""
    spec = build.job.spec.actors
    pod = Pod(
        role=names.ACTOR,
        image=role_image(build, names.ACTOR, spec.image),
        command=role_command(names.ACTOR),
        resources=requirements(names.ACTOR, spec),
        grace_s=GRACE_S,
        mounts=(*role_mounts(build, wiring.config_map, names.ACTOR), *wiring.model.mounts, *wiring.code),
        environment=OFFLINE,
        ports={PORT_NAME: ACTOR_PORT},
        probes=http_probes(PORT_NAME, build.settings.actor_startup_s),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": build.metadata(names.actor(build.name), names.ACTOR),
        "spec": {
            "replicas": build.actors,
            "selector": {"matchLabels": names.selector(build.name, names.ACTOR)},
            "template": pod_template(build, pod, spec),
        },
    }
