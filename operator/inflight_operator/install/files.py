"""The files under ``manifests/``: which objects they hold, and how kustomize puts them together.

Two ways to install share ``base/``: for the whole cluster (``manifests/`` itself) and for one namespace
(``manifests/namespaced/``), which needs no right outside of that namespace and makes no object there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from inflight_operator.builders import Manifest
from inflight_operator.install import deployment, rbac
from inflight_operator.install.kustomize_config import kustomize_config
from inflight_operator.install.rbac import LEASE_ROLE, LEASE_RULES, NAME, OPERATOR_RULES, USER_ROLES, Rule
from inflight_runtime.api.loading import dump_yaml

DIRECTORY: Final = Path("manifests")
HEADER: Final = (
    "# Made by `python -m inflight_operator.install` from operator/inflight_operator/install: change that, then run it"
    " again.\n"
)
WIDTH: Final = 120
KUSTOMIZATION: Final = "kustomization.yaml"
PATCH: Final = "one_namespace.yaml"


def render_files() -> dict[Path, str]:
    """Text of every file, by its path below :data:`DIRECTORY`."""
    return {
        # The Namespace first: nothing else of it can be created before.
        Path(KUSTOMIZATION): _kustomization(["cluster", "base"], namespace=deployment.NAMESPACE),
        **_directory("base", _base()),
        **_directory("cluster", _cluster()),
        **_namespaced(),
        **_kustomize_config(),
    }


def user_roles() -> list[str]:
    """What of jobs the cluster's users may see and change: a role in YAML for each built-in one."""
    return [
        with_rules(rbac.user_role(built_in, {"app.kubernetes.io/name": "inflight"}), rules)
        for built_in, rules in USER_ROLES.items()
    ]


def with_rules(role: Manifest, rules: Iterable[Rule]) -> str:
    """A role as YAML, with the reason above each of its rules."""
    return _text(role) + "rules:\n" + "".join(_comment(rule.reason) + dump_yaml([rule.manifest()]) for rule in rules)


def _base() -> dict[str, str]:
    labels = deployment.operator_labels()
    return {
        "service_account.yaml": _text(deployment.service_account()),
        "role.yaml": with_rules(rbac.role(LEASE_ROLE, labels), LEASE_RULES),
        "role_binding.yaml": _text(rbac.binding("Role", LEASE_ROLE, labels)),
        "lease.yaml": "# No spec: all of that is its holder's, and applying this again leaves it alone.\n"
        + _text(deployment.lease()),
        "deployment.yaml": _text(deployment.deployment()),
        "disruption_budget.yaml": _text(deployment.disruption_budget()),
        "metrics_service.yaml": _text(deployment.metrics_service()),
    }


def _cluster() -> dict[str, str]:
    labels = deployment.operator_labels()
    return {
        "namespace.yaml": _text(deployment.namespace()),
        "cluster_role.yaml": with_rules(rbac.cluster_role(NAME, labels), OPERATOR_RULES),
        "cluster_role_binding.yaml": _text(rbac.binding("ClusterRole", NAME, labels)),
        "user_roles.yaml": "---\n".join(user_roles()),
    }


def _namespaced() -> dict[Path, str]:
    labels = deployment.operator_labels()
    roles = {
        "role.yaml": with_rules(rbac.role(NAME, labels), OPERATOR_RULES),
        "role_binding.yaml": _text(rbac.binding("Role", NAME, labels)),
    }
    return {
        **_directory("namespaced", roles, ["../base"], patches=[{"path": PATCH}]),
        Path("namespaced") / PATCH: HEADER + _text(deployment.one_namespace_patch()),
    }


def _kustomize_config() -> dict[Path, str]:
    directory, name = Path("kustomize-config"), "inflight.yaml"
    component = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "configurations": [name],
    }
    return {
        directory / KUSTOMIZATION: HEADER + dump_yaml(component),
        directory / name: HEADER + dump_yaml(kustomize_config()),
    }


def _directory(name: str, files: Mapping[str, str], others: Iterable[str] = (), **fields: Any) -> dict[Path, str]:
    """A kustomization of these files, and the files."""
    found = {Path(name) / file: HEADER + text for file, text in files.items()}
    return {Path(name) / KUSTOMIZATION: _kustomization([*others, *files], **fields), **found}


def _kustomization(resources: list[str], **fields: Any) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return HEADER + dump_yaml({**head, **fields, "resources": resources})


def _text(manifest: Manifest) -> str:
    return dump_yaml(manifest)


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ") + "\n"
