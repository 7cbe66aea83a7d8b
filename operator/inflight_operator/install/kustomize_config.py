"""What kustomize has to be told about jobs: which of their fields name other objects, and which name images.

Kustomize knows this of the kinds that come with Kubernetes only. A ConfigMap from a ``configMapGenerator`` gets a name
with a hash of its content, and a job that names it would go on naming one that does not exist.
"""

from __future__ import annotations

from typing import Any, Final

from inflight_operator.crd import GROUP
from inflight_operator.validation import ROLES
from inflight_runtime.api import KIND

IMAGE_ROLES: Final = ("inference", "actors", "trainer")
"""Roles whose section has an ``image``. Containers in a ``podTemplate`` kustomize finds by itself."""

CORE: Final = "v1"
SPEC_FIELDS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (CORE, "ConfigMap"): ("spec/environment/configMap",),
    (CORE, "Secret"): ("spec/model/tokenSecretRef/name",),
    (CORE, "PersistentVolumeClaim"): ("spec/model/volume/claimName", "spec/checkpoint/claimName"),
    (CORE, "ServiceAccount"): (),
    ("scheduling.k8s.io/v1", "PriorityClass"): ("spec/scheduling/priorityClassName",),
    ("storage.k8s.io/v1", "StorageClass"): ("spec/coordinator/storage/class", "spec/checkpoint/storage/class"),
}
"""Fields of a job that name an object, by its version and kind."""

_CONTAINERS: Final = ("containers", "initContainers")
POD_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "ConfigMap": (
        *(f"{list_}/env/valueFrom/configMapKeyRef/name" for list_ in _CONTAINERS),
        *(f"{list_}/envFrom/configMapRef/name" for list_ in _CONTAINERS),
        "volumes/configMap/name",
        "volumes/projected/sources/configMap/name",
    ),
    "Secret": (
        *(f"{list_}/env/valueFrom/secretKeyRef/name" for list_ in _CONTAINERS),
        *(f"{list_}/envFrom/secretRef/name" for list_ in _CONTAINERS),
        "imagePullSecrets/name",
        "volumes/projected/sources/secret/name",
        "volumes/secret/secretName",
    ),
    "PersistentVolumeClaim": ("volumes/persistentVolumeClaim/claimName",),
    "ServiceAccount": ("serviceAccountName",),
    "PriorityClass": ("priorityClassName",),
}
"""Likewise, in the pod spec of a role's ``podTemplate``."""


def kustomize_config() -> dict[str, Any]:
    """A kustomize transformer configuration."""
    return {
        "nameReference": [_references(api_version, kind) for api_version, kind in SPEC_FIELDS],
        "images": [_field(f"spec/{role}/image") for role in IMAGE_ROLES],
    }


def _references(api_version: str, kind: str) -> dict[str, Any]:
    group, _, version = api_version.rpartition("/")
    overlays = [f"spec/{role}/podTemplate/spec/{path}" for role in ROLES for path in POD_FIELDS.get(kind, ())]
    return {
        **({"group": group} if group else {}),
        "version": version,
        "kind": kind,
        "fieldSpecs": [_field(path) for path in (*SPEC_FIELDS[api_version, kind], *overlays)],
    }


def _field(path: str) -> dict[str, str]:
    return {"path": path, "group": GROUP, "kind": KIND}
