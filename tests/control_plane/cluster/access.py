"""Service accounts that may do exactly what a ClusterRole file says."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import ClusterError
from .kubectl import Kubectl

TOKEN_LIFETIME = "4h"


@contextlib.contextmanager
def service_account(kubectl: Kubectl, role_file: Path, namespace: str) -> Iterator[Path]:
    """A kubeconfig of a new service account, bound in the whole cluster to the ClusterRole of ``role_file``.

    The role is created under a name of its own, so that two tests do not meet; role and binding go at the end, the
    account with its namespace.

    Args:
        kubectl: acting as somebody who may grant the role.
        role_file: YAML with exactly one ClusterRole; other objects in it are not created.
        namespace: where the account lives.

    Raises:
        ClusterError: the file does not hold exactly one ClusterRole, or the API server refused.
    """
    name = f"test-{uuid.uuid4().hex[:8]}"
    role = _cluster_role(role_file) | {"metadata": {"name": name}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    kubectl.create([role, account, binding])
    try:
        token = kubectl("create", "token", name, "-n", namespace, f"--duration={TOKEN_LIFETIME}").strip()
        yield _with_token(kubectl.kubeconfig, name, token)
    finally:
        kubectl("delete", "clusterrole,clusterrolebinding", name, "--wait=false")


def _with_token(kubeconfig: Path, name: str, token: str) -> Path:
    """Write a kubeconfig for the same server beside ``kubeconfig``, and return its path."""
    document = yaml.safe_load(kubeconfig.read_text())
    document["users"][0]["user"] = {"token": token}
    path = kubeconfig.with_name(f"{name}.kubeconfig")
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def _cluster_role(file: Path) -> dict[str, Any]:
    documents = [document for document in yaml.safe_load_all(file.read_text()) if document]
    roles = [document for document in documents if document.get("kind") == "ClusterRole"]
    if len(roles) != 1:
        raise ClusterError(f"{file} holds {len(roles)} ClusterRoles where one is wanted")
    return dict(roles[0])
