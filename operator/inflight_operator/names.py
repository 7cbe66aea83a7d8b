"""Names, labels and selectors of a job's children.

Every name is the job's (40 characters at most) and a suffix, short enough that pod names and the labels that
controllers derive from them stay within 63 characters with 1,000 servers, actors or trainer nodes. No suffix ends in
another one, so that two jobs of one namespace never meet in a name.
"""

from __future__ import annotations

from typing import Final

from inflight_runtime.api import selectors

COORDINATOR: Final = "coordinator"
INFERENCE: Final = "inference"
ACTOR: Final = "actor"
TRAINER: Final = "trainer"
MODEL: Final = "model"
CONFIG: Final = "config"
CODE: Final = "code"
ROLES: Final = (COORDINATOR, INFERENCE, ACTOR, TRAINER)
"""Roles of a run. The Job that fetches a model and the ConfigMaps are labelled with roles of their own."""

JOB_LABEL: Final = selectors.JOB_LABEL
ROLE_LABEL: Final = selectors.ROLE_LABEL
RUN_UID_LABEL: Final = "inflight.dev/run-uid"
"""On claims: uid of the job whose data they hold."""
HASH_ANNOTATION: Final = "inflight.dev/desired-hash"
"""Digest of the manifest as it was built, without what changes while a job runs."""
REVISION_ANNOTATION: Final = "inflight.dev/builder-revision"
"""Revision of the builders that made the manifest."""
START_ANNOTATION: Final = "inflight.dev/start"
"""Number of the job's start that a child was last written for."""
MANAGED_BY: Final = "inflight-operator"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
WATCH_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
"""Label selector of all children of all jobs."""

REPLICATED_JOB: Final = "n"
"""The JobSet's one replicated job: its name stands in every pod's name."""


selector = selectors.selector
selector_text = selectors.selector_text


def labels(job: str, role: str = "") -> dict[str, str]:
    """Labels of a child; ``role`` is left out on what all roles share."""
    standard = {
        "app.kubernetes.io/name": "inflight",
        "app.kubernetes.io/instance": job,
        MANAGED_BY_LABEL: MANAGED_BY,
    }
    if role:
        standard["app.kubernetes.io/component"] = role
    return {**standard, **selector(job, role)}


def account(job: str) -> str:
    """ServiceAccount of all pods."""
    return f"{job}-account"


def token(job: str) -> str:
    """Secret with the bearer token."""
    return f"{job}-token"


def config(job: str, digest: str) -> str:
    """ConfigMap with the role configs; ``digest`` is of its content."""
    return f"{job}-config-{digest}"


def code(job: str, digest: str) -> str:
    """ConfigMap with the environment's code; ``digest`` is of its content."""
    return f"{job}-code-{digest}"


def coordinator(job: str) -> str:
    """The coordinator's StatefulSet, its Service and its claim."""
    return f"{job}-coordinator"


def inference(job: str) -> str:
    """The servers' StatefulSet, the Service in front of them and their PodDisruptionBudget."""
    return f"{job}-inference"


def inference_pods(job: str) -> str:
    """Headless Service: gives every server a name of its own."""
    return f"{job}-inference-pods"


def actor(job: str) -> str:
    """The actors' Deployment and their PodDisruptionBudget."""
    return f"{job}-actor"


def trainer(job: str) -> str:
    """The trainer's JobSet, and the headless Service that it makes."""
    return f"{job}-t"


def trainer_pod_host(job: str, node: int) -> str:
    """Stable DNS name of a trainer node within the namespace."""
    return f"{trainer(job)}-{REPLICATED_JOB}-0-{node}.{trainer(job)}"


def checkpoint(job: str) -> str:
    """Claim of the checkpoints."""
    return f"{job}-checkpoint"


def model(job: str) -> str:
    """Claim of a fetched model, and the Job that fetches it."""
    return f"{job}-model"


def policy(job: str, source: str) -> str:
    """NetworkPolicy that lets ``source`` (``run``, ``operator``, ``scrape``) in."""
    return f"{job}-from-{source}"
