"""Job files for these tests, and what is asked of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from control_plane.cluster import Kubectl, eventually
from inflight_operator.merge import merge_template

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

    def create(self, *jobs: dict[str, Any]) -> None:
        """``kubectl create``."""
        self.kubectl.create(jobs, "-n", self.namespace)

    def get(self, name: str) -> dict[str, Any]:
        """The job as it is."""
        found: dict[str, Any] = self.kubectl.get(f"rltj/{name}", "-n", self.namespace)
        return found

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

    def wait_phase(self, name: str, *phases: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait for one of these phases; the status then."""

        def there() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        return eventually(f"{name} is {' or '.join(phases)}", there, deadline_s)

    def wait_reason(self, name: str, kind: str, reason: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait until a condition has a reason; the condition then."""

        def there() -> dict[str, Any] | None:
            found = self.condition(name, kind)
            return found if found is not None and found["reason"] == reason else None

        return eventually(f"condition {kind} of {name} says {reason}", there, deadline_s)

    def child(self, what: str) -> dict[str, Any] | None:
        """An object by ``kind/name``, or ``None``."""

        text = self.kubectl("get", what, "-n", self.namespace, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def pods(self, name: str, role: str = "") -> list[dict[str, Any]]:
        """A job's pods."""
        selector = f"inflight.dev/job={name}" + (f",inflight.dev/role={role}" if role else "")
        found: list[dict[str, Any]] = self.kubectl.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return found

    def eventually(self, what: str, probe: Callable[[], Any], deadline_s: float = 30.0) -> Any:
        """Wait for something with a deadline."""
        return eventually(what, probe, deadline_s)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """A status's condition of a type."""
    return next((one for one in status.get("conditions", []) if one["type"] == kind), None)
