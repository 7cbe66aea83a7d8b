"""NetworkPolicies: who reaches a job's pods. Where they connect to is theirs: an environment may need the world."""

from __future__ import annotations

from typing import Any

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.wiring import ACTOR_PORT, COORDINATOR_PORT, INFERENCE_PORT


def policies(build: Build) -> list[Manifest]:
    """The job's pods reach each other, the operator the coordinator, monitoring the metrics; nobody else anything."""
    run = _policy(build, "run", "", [{"podSelector": {"matchLabels": names.selector(build.name)}}], [])
    found = [run]
    settings = build.settings
    if settings.operator_namespace:
        operator = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
            "podSelector": {"matchLabels": settings.operator_labels},
        }
        found.append(_policy(build, "operator", names.COORDINATOR, [operator], [COORDINATOR_PORT]))
    if settings.scrape_from:
        ports = [COORDINATOR_PORT, INFERENCE_PORT, ACTOR_PORT]
        found.append(_policy(build, "scrape", "", [settings.scrape_from], ports))
    return found


def _policy(build: Build, source: str, role: str, peers: list[dict[str, Any]], ports: list[int]) -> Manifest:
    ingress: dict[str, Any] = {"from": peers}
    if ports:
        ingress["ports"] = [{"protocol": "TCP", "port": port} for port in ports]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build.metadata(names.policy(build.name, source), role),
        "spec": {
            "podSelector": {"matchLabels": names.selector(build.name, role)},
            "policyTypes": ["Ingress"],
            "ingress": [ingress],
        },
    }
