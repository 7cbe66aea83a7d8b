"""Why the API server would not have a child, in one word that stays and in the server's own. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from inflight_operator.builders import WORKLOADS
from inflight_operator.kube import KubeError
from inflight_operator.lifecycle import Cause

MAX_MESSAGE: Final = 2_000
JOBSET_INSTALL: Final = "install JobSet 0.11 or newer (https://jobset.sigs.k8s.io)"
RENDER_AGAIN: Final = "suspend the job and mend the role's podTemplate or resources"
RIGHTS: Final = "apply manifests/ again"
_ANY_STATUS: Final[tuple[tuple[str, str, str], ...]] = (
    # A policy answers with the status that its author chose, a webhook with whatever it likes.
    ("failed calling webhook", "WebhookUnavailable", "see to the webhook's Service and pods"),
    (r"ValidatingAdmissionPolicy|admission webhook|denied (the )?request", "AdmissionDenied", ""),
)
_FORBIDDEN: Final[tuple[tuple[str, str, str], ...]] = (
    ("is being terminated", "NamespaceTerminating", ""),
    ("status unknown for quota", "QuotaUnknown", ""),
    ("exceeded quota", "QuotaExceeded", ""),
    ("failed quota", "QuotaExceeded", "the quota asks for requests and limits on every container"),
    (
        r"(minimum|maximum) .* usage per|max limit to request ratio per",
        "LimitRangeViolated",
        "ask for less, or for more, in spec.<role>.resources or storage.size",
    ),
    (r"violates PodSecurity", "PodSecurityViolated", "mend the role's podTemplate"),
    (r"cannot (create|get|list|patch|delete|update|watch) resource", "PermissionDenied", RIGHTS),
    (r"cannot set blockOwnerDeletion", "PermissionDenied", RIGHTS),
)
"""Patterns of the API server's words, the reason they stand for, and what to do about it."""
_OWN_WEBHOOK: Final = re.compile(r'admission webhook "[mv]jobset\.kb\.io" denied')


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that is not as it should be.

    Attributes:
        cause: why.
        passing: whether it is nobody's mistake and will most likely be over soon.
        stalled: whether no waiting can cure it.
    """

    cause: Cause
    passing: bool = False
    stalled: bool = False


def refusal_of(error: KubeError, kind: str, name: str) -> Refusal:
    """What an answer of the API server to a write of a child means.

    Args:
        error: the answer.
        kind: of the child.
        name: of the child.
    """
    what = f"{kind} {name}"
    if error.status == 0:
        return Refusal(Cause("APIServerUnavailable", f"{what}: the API server does not answer"), passing=True)
    if _OWN_WEBHOOK.search(error.message):
        return Refusal(_cause("InvalidPodTemplate", what, error, RENDER_AGAIN), stalled=True)
    for pattern, reason, remedy in _ANY_STATUS:
        if re.search(pattern, error.message):
            return Refusal(_cause(reason, what, error, remedy))
    if error.status == 409:
        return Refusal(_cause("Conflict", what, error), passing=True)
    if error.passing:
        return Refusal(_cause("APIServerUnavailable", what, error), passing=True)
    if error.status == 404:
        return Refusal(_not_found(kind, what, error))
    if error.status == 403:
        for pattern, reason, remedy in _FORBIDDEN:
            if re.search(pattern, error.message):
                return Refusal(_cause(reason, what, error, remedy), passing=reason == "NamespaceTerminating")
        return Refusal(_cause("Forbidden", what, error))
    if error.status in (400, 422):
        return _invalid(kind, what, error)
    return Refusal(_cause("Refused", what, error))


def stale(error: KubeError) -> bool:
    """Whether a write was refused because the object is not, or no longer, the one that was meant."""
    other = error.status == 422 and "metadata.uid: Invalid value" in error.message
    return error.missing or other or (error.status == 409 and not error.exists)


def shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """A message of bearable length in one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _not_found(kind: str, what: str, error: KubeError) -> Cause:
    if error.message.startswith("namespaces "):
        return _cause("NamespaceTerminating", what, error)
    if kind == "JobSet" and "jobsets" not in error.message:
        return Cause("JobSetMissing", f"{what}: the cluster has no JobSet; {JOBSET_INSTALL}")
    return _cause("NotFound", what, error)


def _invalid(kind: str, what: str, error: KubeError) -> Refusal:
    unknown = re.search(r"unknown field|Unsupported value|field not declared in schema", error.message)
    if unknown and kind == "JobSet" and "template.spec.template" not in error.message:
        return Refusal(_cause("JobSetTooOld", what, error, JOBSET_INSTALL))
    if kind == "PersistentVolumeClaim":
        return Refusal(_cause("ClaimRefused", what, error))
    if kind in WORKLOADS:
        return Refusal(_cause("InvalidPodTemplate", what, error, RENDER_AGAIN), stalled=True)
    return Refusal(_cause("Refused", what, error))


def _cause(reason: str, what: str, error: KubeError, remedy: str = "") -> Cause:
    words = error.message or error.reason
    return Cause(reason, shortened(f"{what}: {words}" + (f"; {remedy}" if remedy else "")))
