"""Jobs, settings and facts to build children from."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from inflight_operator.builders import Child, EnvironmentCode, Facts, build_children
from inflight_operator.settings import Settings
from inflight_runtime.api import RLTrainingJob, validate_job

UID = "3f0c5b1e-7a52-4d43-9a0e-6f2f8f1f0d11"
FACTS = Facts(namespace="team-a", uid=UID, token="a-token-for-tests")
SETTINGS = Settings.model_validate(
    {f"{role}_image": "inflight-runtime:test" for role in ("coordinator", "inference", "actor", "trainer")}
)
CODE = EnvironmentCode({"capitals.py": "class Capitals: ...\n"}, {"countries.bin": "AAEC"})


def make_job(name: str = "letters", **sections: Any) -> RLTrainingJob:
    """A checked job; each section is laid over a small one."""
    spec: dict[str, Any] = {
        "model": {"source": "./model"},
        "environment": {"entrypoint": "sort_letters:SortLetters"},
        "algorithm": {"steps": 100, "promptsPerStep": 16, "groupSize": 8},
        "sampling": {"maxTokens": 6},
    }
    for section, fields in sections.items():
        spec[section] = {**spec.get(section, {}), **fields}
    head = {"apiVersion": "inflight.dev/v1alpha1", "kind": "RLTrainingJob", "metadata": {"name": name}}
    return validate_job(copy.deepcopy({**head, "spec": spec}), "test")


def on_nodes(job: RLTrainingJob, nodes: int, processes: int = 1) -> RLTrainingJob:
    """The job with a trainer on several nodes, which no engine of today permits."""
    trainer = job.spec.trainer.model_copy(update={"nodes": nodes, "processes_per_node": processes})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def children(job: RLTrainingJob, settings: Settings = SETTINGS, **facts: Any) -> list[Child]:
    """All children of ``job``."""
    return build_children(job, settings, replace(FACTS, **facts))


def find(found: list[Child], kind: str, name: str = "") -> dict[str, Any]:
    """The one child of this kind (and name)."""
    matches = [child.manifest for child in found if child.kind == kind and name in ("", child.name)]
    assert len(matches) == 1, f"{len(matches)} children of kind {kind} {name}"
    return matches[0]


def template_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pod template of a workload."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template: dict[str, Any] = spec["template"]
    return template


def workloads(found: list[Child]) -> dict[str, dict[str, Any]]:
    """Pod template of every workload, by role."""
    kinds = ("StatefulSet", "Deployment", "JobSet", "Job")
    return {child.role: template_of(child.manifest) for child in found if child.kind in kinds}


def container_of(template: dict[str, Any], name: str) -> dict[str, Any]:
    """One container of a pod template."""
    found: dict[str, Any] = next(item for item in template["spec"]["containers"] if item["name"] == name)
    return found
