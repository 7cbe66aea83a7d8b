"""Which containers of a job's pods there are, and how far each of them is (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from inflight_runtime.api.selectors import ROLE_LABEL
from inflight_runtime.cluster.connection import Object

MODEL: Final = "model"
"""Role of the Job that fetches a model."""
ROLES: Final = ("coordinator", "inference", "actor", "trainer", MODEL)
"""Roles that have pods."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod.

    Attributes:
        pod: the pod's name.
        uid: the pod's.
        name: the container's.
        source: what stands in front of its lines.
        started: whether it has a log.
        running: whether its log grows.
        restarts: how often it has been started again.
        has_previous: whether there is a log of its life before.
        waits_for: why it has not started, in the kubelet's word.
    """

    pod: str
    uid: str
    name: str
    source: str
    started: bool
    running: bool
    restarts: int
    has_previous: bool
    waits_for: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Tells this life of the container from all others."""
        return self.uid, self.name, self.restarts


def containers(pods: Iterable[Object]) -> list[Container]:
    """The containers that do their role's work, in order of pods; of an overlay's sidecars there is kubectl logs."""
    found = []
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        role = (metadata.get("labels") or {}).get(ROLE_LABEL, "")
        names = [one["name"] for part in ("initContainers", "containers") for one in spec.get(part) or []]
        ours = [name for name in names if name == role or name.startswith(f"{role}-")] or names
        told = {
            one["name"]: one
            for part in ("initContainerStatuses", "containerStatuses")
            for one in status.get(part) or []
        }
        for name in ours:
            one = told.get(name, {})
            state = one.get("state") or {}
            waits_for = str((state.get("waiting") or {}).get("reason") or _unscheduled(status))
            ended_before = "terminated" in (one.get("lastState") or {})
            found.append(
                Container(
                    pod=metadata["name"],
                    uid=metadata["uid"],
                    name=name,
                    source=metadata["name"] if name == role or len(ours) == 1 else f"{metadata['name']}/{name}",
                    started="running" in state or "terminated" in state or ended_before,
                    running="running" in state,
                    restarts=int(one.get("restartCount") or 0),
                    has_previous=ended_before,
                    waits_for=waits_for,
                )
            )
    return found


def _unscheduled(status: Object) -> str:
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") != "True":
            return str(one.get("reason") or "not scheduled")
    return "not started"
