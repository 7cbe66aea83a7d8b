"""PodDisruptionBudgets for servers and actors.

Not for the trainer, whose Jobs have no scale subresource, nor for the coordinator: on a single pod one blocks drains.
"""

from __future__ import annotations

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest


def budgets(build: Build) -> list[Manifest]:
    """A drain takes one server and one actor at a time; what is not ready anyway may go."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": build.metadata(name(build.name), role),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": names.selector(build.name, role)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
        for role, name in ((names.INFERENCE, names.inference), (names.ACTOR, names.actor))
    ]
