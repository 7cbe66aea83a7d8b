"""Builders: a job and the facts around it in, the manifests of all its children out. Pure, one module per child."""

from __future__ import annotations

from collections.abc import Sequence

from inflight_operator import names
from inflight_operator.builders import (
    actors,
    claims,
    config_maps,
    coordinator,
    disruption,
    identity,
    inference,
    model,
    network,
    trainer,
)
from inflight_operator.builders.build import (
    BUILDER_REVISION,
    WORKLOADS,
    Build,
    Child,
    EnvironmentCode,
    Facts,
    Manifest,
    finished,
    pod_template_of,
    role_of,
)
from inflight_operator.builders.wiring import COORDINATOR_PORT, INFERENCE_PORT, wire
from inflight_operator.settings import Settings
from inflight_runtime.api import RLTrainingJob
from inflight_runtime.api.rules import is_accelerator

__all__ = [
    "BUILDER_REVISION",
    "COORDINATOR_PORT",
    "INFERENCE_PORT",
    "WORKLOADS",
    "Build",
    "Child",
    "EnvironmentCode",
    "Facts",
    "Manifest",
    "build_children",
    "pod_template_of",
    "requested_gpus",
    "resolved_images",
    "role_of",
]


def build_children(job: RLTrainingJob, settings: Settings, facts: Facts) -> list[Child]:
    """All children of a job, in the order in which they are applied: cheap objects first, GPUs last.

    Args:
        job: a checked job.
        settings: the operator's.
        facts: what the cluster says of the job.

    Raises:
        MergeError: a ``podTemplate`` overlay cannot be merged.
    """
    build = Build(job, settings, facts)
    wiring = wire(build)
    fetched = bool(wiring.model.fetched)
    shared = [identity.service_account(build), identity.token_secret(build), config_maps.role_configs(build, wiring)]
    if job.spec.environment.config_map is not None:
        shared.append(config_maps.environment_code(build))
    shared += [*network.policies(build), *disruption.budgets(build)]
    shared += [claims.coordinator_claim(build)]
    if (checkpoints := claims.checkpoint_claim(build)) is not None:
        shared.append(checkpoints)
    if fetched:
        shared.append(claims.model_claim(build))
    shared += [coordinator.service(build), inference.pods_service(build), inference.service(build)]
    found = [Child(finished(manifest), role_of(manifest)) for manifest in shared]
    found.append(Child(finished(coordinator.stateful_set(build, wiring)), names.COORDINATOR))
    if fetched:
        found.append(Child(finished(model.fetch_job(build, wiring)), names.MODEL))
    found.append(Child(finished(trainer.job_set(build, wiring)), names.TRAINER, fetched))
    given = job.spec.inference.replicas is not None
    found.append(Child(finished(inference.stateful_set(build, wiring)), names.INFERENCE, fetched, given))
    given = job.spec.actors.replicas is not None
    found.append(Child(finished(actors.deployment(build, wiring)), names.ACTOR, fetched, given))
    return found


def resolved_images(children: list[Child]) -> dict[str, str]:
    """Image of each role's own container, overlays included, for the job's status."""
    images: dict[str, str] = {}
    for child in children:
        for container in _containers(child):
            if container["name"] == child.role:
                images[child.role] = container["image"]
    return images


def requested_gpus(children: Sequence[Child]) -> int:
    """GPUs that all pods of all roles ask for together."""
    total = 0
    for child in children:
        spec = child.manifest.get("spec", {})
        pods = spec.get("replicas", 1)
        if child.kind == "JobSet":
            pods = spec["replicatedJobs"][0]["template"]["spec"]["completions"]
        for container in _containers(child):
            limits = container.get("resources", {}).get("limits", {})
            total += sum(
                pods * int(amount) for name, amount in limits.items() if is_accelerator(name) and _whole(amount)
            )
    return total


def _containers(child: Child) -> list[Manifest]:
    template = pod_template_of(child.manifest)
    return [] if template is None else list(template["spec"]["containers"])


def _whole(amount: object) -> bool:
    return str(amount).isdecimal()
