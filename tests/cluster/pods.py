"""Pods as the strictest Pod Security level wants them, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.cluster import Kubectl, eventually

USER = 10001
RUN_DEADLINE_S = 60.0


def pod_spec(image: str, command: Sequence[str], **more: Any) -> dict[str, Any]:
    """The spec of a pod of one container that Pod Security ``restricted`` admits; ``more`` goes into the container."""
    container = {
        "name": "c",
        "image": image,
        "command": [*command],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        **more,
    }
    return {
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 0,
    }


def pod(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A pod that runs once."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", **spec},
    }


def phase(
    kubectl: Kubectl, namespace: str, name: str, wanted: str, deadline_s: float = RUN_DEADLINE_S
) -> dict[str, Any]:
    """Wait until a pod is in a phase; return it.

    Raises:
        ClusterError: it is not in time; the message holds the pod's status.
    """
    seen: dict[str, Any] = {}

    def there() -> dict[str, Any] | None:
        seen.update(kubectl.get(f"pod/{name}", "-n", namespace))
        return seen if seen["status"]["phase"] == wanted else None

    try:
        return eventually(f"pod {name} is {wanted}", there, deadline_s)
    except Exception as error:
        error.add_note(f"its status: {seen.get('status')}")
        raise


def lives(pods: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """Uid and restarts of each pod by name."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"]["containerStatuses"]),
        )
        for pod in pods
    }
