"""The operator's own objects besides its rights. None of them names a namespace: that is chosen at installation."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from inflight_operator.builders import Manifest
from inflight_operator.builders.pods import HOME, container_security, http_probe
from inflight_operator.install.rbac import NAME
from inflight_operator.settings import PREFIX, Settings

NAMESPACE: Final = "inflight-system"
IMAGE: Final = "inflight-operator"
METRICS_SERVICE: Final = f"{NAME}-metrics"
CONTAINER: Final = "operator"
PORT_NAME: Final = "http"
PORT: Final = 8080
REPLICAS: Final = 2
USER: Final = 10001
GRACE_S: Final = 20


def operator_labels() -> dict[str, str]:
    """Labels of all installed objects, the operator's pods among them: jobs' NetworkPolicies let these in.

    Never ``app.kubernetes.io/managed-by: inflight-operator``: that marks the children of jobs.
    """
    return dict(Settings().operator_labels)


def namespace() -> Manifest:
    """The operator's namespace, which admits nothing that the strictest Pod Security Standard does not."""
    security = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": operator_labels() | security},
    }


def service_account() -> Manifest:
    """Who the operator is; only pods that ask for its token get it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(NAME),
        "automountServiceAccountToken": False,
    }


def lease() -> Manifest:
    """What the replicas compete for.

    Without a spec: all of that is the holder's, and applying this again leaves it alone.
    """
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": _metadata(NAME)}


def metrics_service() -> Manifest:
    """For scraping. Headless: each replica has numbers of its own, and one of the two only waits."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(METRICS_SERVICE),
        "spec": {
            "clusterIP": "None",
            "selector": operator_labels(),
            "ports": [{"name": PORT_NAME, "port": PORT, "targetPort": PORT_NAME}],
        },
    }


def disruption_budget() -> Manifest:
    """A drain of several nodes leaves one replica."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(NAME),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": operator_labels()},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def deployment() -> Manifest:
    """Two replicas, of which one acts.

    No priority class: some clusters (GKE) admit the system ones in no other namespace than kube-system.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(NAME),
        "spec": {
            "replicas": REPLICAS,
            "selector": {"matchLabels": operator_labels()},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {"metadata": {"labels": operator_labels()}, "spec": _pod_spec()},
        },
    }


def one_namespace_patch() -> Manifest:
    """Strategic merge patch of the Deployment: work in the operator's own namespace only."""
    container = {"name": CONTAINER, "env": [_own_namespace("namespace")]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def _pod_spec() -> dict[str, Any]:
    return {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # A cluster of one node runs both.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": operator_labels()},
                # During an update the old pods do not count.
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
        "containers": [_container()],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def _container() -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": f"{IMAGE}:{importlib.metadata.version('inflight')}",
        "command": ["python", "-m", "inflight_operator"],
        "env": [
            _own_namespace("operator_namespace"),
            _own_namespace("lease_namespace"),
            {"name": _variable("http_port"), "value": str(PORT)},
            {"name": "HOME", "value": HOME},
        ],
        "ports": [{"name": PORT_NAME, "containerPort": PORT}],
        "livenessProbe": http_probe("/healthz", PORT_NAME, period_s=10, failures=6),
        "readinessProbe": http_probe("/readyz", PORT_NAME, period_s=5, failures=2),
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": HOME}],
    }


def _own_namespace(setting: str) -> dict[str, Any]:
    return {"name": _variable(setting), "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}


def _variable(setting: str) -> str:
    return PREFIX + setting.upper()


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "labels": operator_labels()}
