"""Resource requests and limits of a role's container, and what they tell about the machine below it."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, Final

from inflight_operator import names
from inflight_operator.merge import merge_template
from inflight_runtime.api.placement import PodRole
from inflight_runtime.api.rules import is_accelerator
from inflight_runtime.config.render import Device

Requirements = dict[str, dict[str, str]]

DEFAULTS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    names.COORDINATOR: {"cpu": ("250m", "2"), "memory": ("512Mi", "2Gi")},
    names.INFERENCE: {"cpu": ("1", "8"), "memory": ("4Gi", "16Gi")},
    names.ACTOR: {"cpu": ("500m", "4"), "memory": ("1Gi", "4Gi")},
    names.TRAINER: {"cpu": ("1", "8"), "memory": ("4Gi", "16Gi")},
    names.MODEL: {"cpu": ("250m", "2"), "memory": ("512Mi", "2Gi")},
}
"""Request and limit of each role where the job gives neither."""
_CPU: Final = re.compile(r"^\+?([0-9.]+)([numk]?)$")
_CPU_UNITS: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(1000),
}


def requirements(role: str, spec: PodRole | None, gpus: dict[str, str] | None = None) -> Requirements:
    """Requests and limits of a role's container, both for every resource.

    What is given once counts for both; cpu and memory that are not given at all are the role's defaults.

    Args:
        role: whose defaults.
        spec: the role's part of the job, with what its overlay says of the container.
        gpus: what to ask for where the job names no accelerator.
    """
    given = {} if spec is None else _given(role, spec)
    requests, limits = dict(given.get("requests", {})), dict(given.get("limits", {}))
    for name, (request, limit) in DEFAULTS[role].items():
        if name not in requests and name not in limits:
            requests[name], limits[name] = request, limit
    if gpus and not any(is_accelerator(name) for name in (*requests, *limits)):
        limits |= gpus
    everything = sorted({*requests, *limits})
    return {
        "requests": {name: requests.get(name, limits.get(name, "")) for name in everything},
        "limits": {name: limits.get(name, requests.get(name, "")) for name in everything},
    }


def device_of(resources: Requirements) -> Device:
    """What a container with these resources computes on."""
    asked = (name for name, amount in resources["limits"].items() if is_accelerator(name) and str(amount) != "0")
    return "cuda" if any(asked) else "cpu"


def threads_of(resources: Requirements, processes: int = 1) -> int:
    """CPU threads for each of a container's processes: its whole cores, at least one."""
    found = _CPU.match(str(resources["limits"]["cpu"]))
    cores = Decimal(found[1]) * _CPU_UNITS[found[2]] if found else Decimal(1)
    return max(1, math.floor(cores / processes))


def _given(role: str, spec: PodRole) -> dict[str, dict[str, Any]]:
    """What the job says of the container's resources, in the field and in the overlay."""
    given = {"requests": dict(spec.resources.requests), "limits": dict(spec.resources.limits)}
    pod = spec.pod_template.get("spec")
    containers = pod.get("containers") if isinstance(pod, dict) else None
    for container in containers if isinstance(containers, list) else []:
        if isinstance(container, dict) and container.get("name") == role:
            overlay = container.get("resources")
            if isinstance(overlay, dict):
                given = merge_template(given, overlay, "podTemplate.spec.containers.resources")
    return given
