"""Who may do what: the operator's own rights, and what of jobs the cluster's users may see and change.

The operator runs with Kopf's ``settings.scanning.disabled``: it then asks the API server for no namespaces and no
CustomResourceDefinitions, only for discovery (``/api``, ``/apis``), which every authenticated account may read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from inflight_operator.builders import Manifest
from inflight_operator.crd import GROUP, PLURAL

NAME: Final = "inflight-operator"
"""Of the operator's ServiceAccount, Deployment, Lease and roles."""
LEASE_ROLE: Final = f"{NAME}-lease"
RBAC_GROUP: Final = "rbac.authorization.k8s.io"
AGGREGATE_LABEL: Final = f"{RBAC_GROUP}/aggregate-to"

READ: Final = ("get", "list", "watch")
MANAGE: Final = (*READ, "create", "patch", "delete")
"""Of children: made by POST, changed by server-side apply (a PATCH), taken away when a run has ended."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a role.

    Attributes:
        group: API group; empty for the core.
        resources: plurals, with a subresource after a slash.
        verbs: what may be done.
        reason: why; stands above the rule in the YAML.
        names: the only objects that are meant; empty for all.
    """

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    reason: str
    names: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """As RBAC writes it."""
        rule: dict[str, Any] = {"apiGroups": [self.group], "resources": [*self.resources]}
        if self.names:
            rule["resourceNames"] = [*self.names]
        return rule | {"verbs": [*self.verbs]}


OPERATOR_RULES: Final = (
    Rule(GROUP, (PLURAL,), READ, "The jobs. Their spec and metadata are the users': they are never written."),
    Rule(GROUP, (f"{PLURAL}/status",), ("get", "patch"), "Phase, conditions and progress."),
    Rule(
        GROUP,
        (f"{PLURAL}/finalizers",),
        ("update",),
        "No finalizer is ever set. Children name their job as an owner that blocks deletion, and where the admission"
        " plugin OwnerReferencesPermissionEnforcement is on (OpenShift) that asks for this right.",
    ),
    Rule(
        "",
        ("serviceaccounts", "configmaps", "services", "persistentvolumeclaims"),
        MANAGE,
        "Children of a job. ConfigMaps are read, too, where a job names one with its environment's code.",
    ),
    Rule("apps", ("statefulsets", "deployments"), MANAGE, "Coordinator, inference servers and actors."),
    Rule(
        "batch",
        ("jobs",),
        MANAGE,
        "The Job that fetches a model. The trainer's Jobs belong to its JobSet and are only watched.",
    ),
    Rule("jobset.x-k8s.io", ("jobsets",), MANAGE, "The trainer."),
    Rule("networking.k8s.io", ("networkpolicies",), MANAGE, "Who reaches a job's pods."),
    Rule("policy", ("poddisruptionbudgets",), MANAGE, "Of inference servers and actors."),
    Rule(
        "",
        ("secrets",),
        ("create", "get", "delete"),
        "A job's bearer token, by its name; it goes with the other children when a finished job's time is over."
        " No list and no watch: no Secret can be found that is not known by name.",
    ),
    Rule("", ("pods",), ("list",), "Why a pod of a job does not start or has ended. Pods are not watched."),
    Rule(
        "",
        ("events",),
        ("create", "list"),
        "What happens to a job is told in events. Listed: why a controller could not make a child's pods (quota).",
    ),
)
"""What the operator may do where it works: in the whole cluster, or in one namespace."""

LEASE_RULES: Final = (
    Rule(
        "coordination.k8s.io",
        ("leases",),
        ("get", "patch"),
        "Whoever holds this Lease acts. It is installed, not made: a right to create cannot be bound to a name.",
        (NAME,),
    ),
)
"""What the operator may do in its own namespace."""

USER_ROLES: Final = {
    "view": (
        Rule(GROUP, (PLURAL,), READ, "Part of the cluster's own roles view, edit and admin."),
        Rule(GROUP, (f"{PLURAL}/status", f"{PLURAL}/scale"), ("get",), "kubectl get --subresource, and autoscalers."),
    ),
    "edit": (
        Rule(
            GROUP,
            (PLURAL,),
            ("create", "delete", "deletecollection", "patch", "update"),
            "Part of the cluster's own roles edit and admin. A job's pods are what their author could make anyway:"
            " these roles may create pods. The status is the operator's.",
        ),
        Rule(GROUP, (f"{PLURAL}/scale",), ("patch", "update"), "kubectl scale: the number of inference servers."),
    ),
}
"""Rules by the built-in role that they are added to; each of these is part of the next (view, edit, admin)."""


def role(name: str, labels: dict[str, str]) -> Manifest:
    """A Role without its rules, which are written with their reasons (:mod:`.files`)."""
    return {"apiVersion": f"{RBAC_GROUP}/v1", "kind": "Role", "metadata": {"name": name, "labels": labels}}


def cluster_role(name: str, labels: dict[str, str]) -> Manifest:
    """A ClusterRole without its rules."""
    return role(name, labels) | {"kind": "ClusterRole"}


def binding(kind: str, name: str, labels: dict[str, str]) -> Manifest:
    """Gives the operator's ServiceAccount a role.

    The account's namespace is left out: in a RoleBinding it is the binding's own, in a ClusterRoleBinding kustomize
    writes it. Were one given here, kustomize would leave it behind when an installation chooses another.

    Args:
        kind: of the role (``Role`` or ``ClusterRole``).
        name: of the role and of the binding.
        labels: of the binding.
    """
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": f"{kind}Binding",
        "metadata": {"name": name, "labels": labels},
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": NAME}],
    }


def user_role(built_in: str, labels: dict[str, str]) -> Manifest:
    """The ClusterRole, without its rules, that is added to a built-in one."""
    return cluster_role(f"inflight-{built_in}", labels | {f"{AGGREGATE_LABEL}-{built_in}": "true"})
