"""What stands in the way of a job on a real cluster, and how it is told of it."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from control_plane.cluster import Cluster, Kubectl, KubectlError, eventually
from control_plane.jobs import Jobs, condition

OPERATOR = "inflight-operator"
ADMISSION = "admissionregistration.k8s.io/v1"


class Obstacle:
    """Objects that are in the way until :meth:`remove`.

    Args:
        kubectl: of an administrator.
        documents: the objects.
        namespace: for those that live in one; empty for objects of the whole cluster.
    """

    def __init__(self, kubectl: Kubectl, documents: list[dict[str, Any]], namespace: str = "") -> None:
        self._kubectl = kubectl
        self._where = ["-n", namespace] if namespace else []
        self._names = [f"{one['kind'].lower()}.{_group(one)}/{one['metadata']['name']}" for one in documents]
        self._there = True
        kubectl.create(documents, *self._where)

    def remove(self) -> None:
        """Take them away."""
        if self._there:
            self._there = False
            self._kubectl("delete", *self._names, *self._where, "--wait=true")


@contextlib.contextmanager
def obstacle(cluster: Cluster, *documents: dict[str, Any], namespace: str = "") -> Iterator[Obstacle]:
    """Put objects in the way; they are gone at the end."""
    made = Obstacle(cluster.kubectl, list(documents), namespace)
    try:
        yield made
    finally:
        made.remove()


@contextlib.contextmanager
def quota(cluster: Cluster, namespace: str, hard: dict[str, str]) -> Iterator[Obstacle]:
    """A ResourceQuota that is counted already."""
    with obstacle(cluster, _object("v1", "ResourceQuota", "small", spec={"hard": hard}), namespace=namespace) as made:

        def counted() -> bool:
            found = cluster.kubectl.get("resourcequota/small", "-n", namespace)
            return found.get("status", {}).get("hard") == hard

        eventually("the quota is counted", counted)
        yield made


def limit_range(kind: str, **maximum: str) -> dict[str, Any]:
    """A LimitRange with an upper bound."""
    limits = [{"type": kind, "max": maximum}]
    return _object("v1", "LimitRange", "small", spec={"limits": limits})


PROBES = {"pods": ("run", "probe"), "deployments": ("create", "deployment", "probe")}
"""Commands that ask for an object of a resource."""


@contextlib.contextmanager
def policy(cluster: Cluster, namespace: str, group: str, resource: str, message: str) -> Iterator[Obstacle]:
    """A ValidatingAdmissionPolicy that is in force: nobody may create a resource in one namespace.

    It answers with its default, 422.
    """
    constraints = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "resourceRules": [
            {"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [resource]}
        ],
    }
    validations = [{"expression": "false", "message": message}]
    spec = {"failurePolicy": "Fail", "matchConstraints": constraints, "validations": validations}
    binding = {"policyName": namespace, "validationActions": ["Deny"]}
    documents = [
        _object(ADMISSION, "ValidatingAdmissionPolicy", namespace, spec=spec),
        _object(ADMISSION, "ValidatingAdmissionPolicyBinding", namespace, spec=binding),
    ]

    def in_force() -> bool:
        try:
            cluster.kubectl(*PROBES[resource], "--image=i", "--dry-run=server", "-n", namespace)
        except KubectlError as error:
            return message in error.stderr
        return False

    with obstacle(cluster, *documents) as made:
        eventually("the policy is in force", in_force)
        yield made


def dead_webhook(namespace: str, group: str, resource: str) -> dict[str, Any]:
    """A webhook that nobody answers, asked about one resource in one namespace."""
    hook = {
        "name": "dead.example.org",
        "clientConfig": {"url": "https://127.0.0.1:1/validate"},
        "rules": [{"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [resource]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return _object(ADMISSION, "ValidatingWebhookConfiguration", namespace, webhooks=[hook])


class Told:
    """What a job says of its trouble.

    Args:
        jobs: of its namespace.
        name: of the job.
    """

    def __init__(self, jobs: Jobs, name: str) -> None:
        self._jobs = jobs
        self._name = name

    def reason(self, *reasons: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait until ``Ready`` is False for one of these reasons; the status then."""

        def told() -> dict[str, Any] | None:
            status = self._jobs.status(self._name)
            ready = condition(status, "Ready")
            return status if ready and ready["status"] == "False" and ready["reason"] in reasons else None

        return eventually(f"{self._name} is not ready: {' or '.join(reasons)}", told, deadline_s)

    def is_waiting(self, reason: str, *words: str, deadline_s: float = 30.0) -> dict[str, Any]:
        """Wait for a reason that may pass: Reconciling and not Stalled, with the server's words; the status then."""
        status = self.reason(reason, deadline_s=deadline_s)
        ready, reconciling = condition(status, "Ready"), condition(status, "Reconciling")
        assert ready is not None and reconciling is not None, status
        assert (reconciling["status"], reconciling["reason"]) == ("True", reason), reconciling
        assert condition(status, "Stalled") is None, status
        assert [word for word in words if word not in ready["message"]] == [], ready
        return status

    def warnings(self, reason: str = "") -> list[dict[str, Any]]:
        """Warning Events of the job by the operator."""
        selector = f"involvedObject.kind=RLTrainingJob,involvedObject.name={self._name},type=Warning"
        found = self._jobs.kubectl.get("events", "-n", self._jobs.namespace, f"--field-selector={selector}")["items"]
        ours = [one for one in found if one.get("reportingComponent") == OPERATOR]
        return [one for one in ours if reason in ("", one["reason"])]

    def one_warning(self, reason: str) -> dict[str, Any]:
        """Wait for the one Event that tells of a reason."""
        found: list[dict[str, Any]] = eventually(f"an event {reason}", lambda: self.warnings(reason), 10)
        assert len(found) == 1, found
        return found[0]


def calls(cluster: Cluster, since: int, user: str, namespace: str) -> Counter[tuple[str, str]]:
    """How often somebody has called the API in a namespace, by verb and resource."""
    events = cluster.audit.events(since)
    return Counter((one.verb, one.resource) for one in events if (one.user, one.namespace) == (user, namespace))


def patched(kubectl: Kubectl, what: str, namespace: str, patch: dict[str, Any], *arguments: str) -> None:
    """``kubectl patch`` with a merge patch."""
    kubectl("patch", what, "-n", namespace, "--type=merge", "-p", json.dumps(patch), *arguments)


def _object(api_version: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **fields}


def _group(document: dict[str, Any]) -> str:
    group, _, version = document["apiVersion"].rpartition("/")
    return f"{version}.{group}"
