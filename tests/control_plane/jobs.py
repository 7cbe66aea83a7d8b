"""Job files for these tests, and what is asked of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from control_plane.cluster import ClusterError, Kubectl, eventually
from control_plane.cluster.reading import Reader
from control_plane.snapshots import KINDS
from inflight_operator.merge import merge_template

HOLD = "test.inflight.dev/hold"
"""A finalizer that nobody but a test takes away."""
SMALL: dict[str, Any] = {
    "apiVersion": "inflight.dev/v1alpha1",
    "kind": "RLTrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "model": {"source": "/models/tiny"},
        "environment": {"entrypoint": "package.module:Environment"},
        "algorithm": {"steps": 10, "promptsPerStep": 4, "groupSize": 4},
        "inference": {"replicas": 2},
        "actors": {"replicas": 1, "concurrency": 4},
        "trainer": {"maxRestarts": 1},
    },
}


def job(name: str, **spec: Any) -> dict[str, Any]:
    """A small job, with parts of its spec merged in."""
    made = copy.deepcopy(SMALL)
    made["metadata"]["name"] = name
    made["spec"] = merge_template(made["spec"], spec)
    return made


class Jobs:
    """A namespace's jobs, as a user sees and handles them.

    Args:
        kubectl: of a user who may do that.
        namespace: theirs.
    """

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.reader = Reader(kubectl.kubeconfig)

    def create(self, *jobs: dict[str, Any]) -> None:
        """``kubectl create``."""
        self.kubectl.create(jobs, "-n", self.namespace)

    def get(self, name: str) -> dict[str, Any]:
        """The job as it is."""
        return self.there(f"rltj/{name}")

    def status(self, name: str) -> dict[str, Any]:
        """Its status."""
        status: dict[str, Any] = self.get(name).get("status", {})
        return status

    def condition(self, name: str, kind: str) -> dict[str, Any] | None:
        """One of its conditions."""
        return condition(self.status(name), kind)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        """Merge into its spec."""

        body = json.dumps({"spec": spec})
        self.kubectl("patch", f"rltj/{name}", "-n", self.namespace, "--type=merge", "-p", body)

    def suspend(self, name: str) -> None:
        """Set ``spec.suspend``."""
        self.patch(name, {"suspend": True})

    def resume(self, name: str, **spec: Any) -> None:
        """Take ``spec.suspend`` back, with parts of the spec changed."""
        self.patch(name, {"suspend": False, **spec})

    def wait_phase(self, name: str, *phases: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait for one of these phases; the status then."""

        def there() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        try:
            return eventually(f"{name} is {' or '.join(phases)}", there, deadline_s)
        except ClusterError as error:
            raise ClusterError(f"{error}; it is {self.status(name).get('phase')}") from None

    def wait_reason(self, name: str, kind: str, reason: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait until a condition has a reason; the condition then."""

        def there() -> dict[str, Any] | None:
            found = self.condition(name, kind)
            return found if found is not None and found["reason"] == reason else None

        return eventually(f"condition {kind} of {name} says {reason}", there, deadline_s)

    def child(self, what: str) -> dict[str, Any] | None:
        """An object by ``kind/name``, or ``None``."""
        return self.reader.get(what, self.namespace)

    def there(self, what: str) -> dict[str, Any]:
        """An object by ``kind/name`` that must be there."""
        found = self.child(what)
        assert found is not None, f"there is no {what} in {self.namespace}"
        return found

    def pods(self, name: str, role: str = "") -> list[dict[str, Any]]:
        """A job's pods."""
        selector = f"inflight.dev/job={name}" + (f",inflight.dev/role={role}" if role else "")
        return self.reader.list("Pod", self.namespace, selector)

    def hold(self, pod: str) -> None:
        """Keep a pod from being gone once it is deleted, until :meth:`release`."""
        self._patch_pod(pod, {"metadata": {"finalizers": [HOLD]}})

    def release(self, pod: str) -> None:
        """Let a pod go that :meth:`hold` kept."""
        # By name: the Job's controller takes its own finalizer away at any moment.
        self._patch_pod(pod, {"metadata": {"$deleteFromPrimitiveList/finalizers": [HOLD]}})

    def end_held(self, pod: str, exit_code: int) -> None:
        """Let the containers of a pod that is being deleted end, as a kubelet tells of it before the pod is gone."""
        names = [one["name"] for one in self.there(f"pod/{pod}")["spec"]["containers"]]
        ended = {"terminated": {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed"}}
        statuses = [
            {"name": name, "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": ended}
            for name in names
        ]
        status = {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": statuses}
        self._patch_pod(pod, {"status": status}, "--subresource=status")

    def _patch_pod(self, pod: str, body: dict[str, Any], *options: str) -> None:
        self.kubectl("patch", f"pod/{pod}", "-n", self.namespace, "--type=strategic", "-p", json.dumps(body), *options)

    def eventually(self, what: str, probe: Callable[[], Any], deadline_s: float = 30.0) -> Any:
        """Wait for something with a deadline."""
        return eventually(what, probe, deadline_s)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """A status's condition of a type."""
    return next((one for one in status.get("conditions", []) if one["type"] == kind), None)


def left(jobs: Jobs, name: str) -> list[str]:
    """What is left of a job, claims apart."""
    kinds = KINDS.replace(",persistentvolumeclaims", "")
    return jobs.kubectl("get", kinds, "-n", jobs.namespace, "-l", f"inflight.dev/job={name}", "-o", "name").split()
