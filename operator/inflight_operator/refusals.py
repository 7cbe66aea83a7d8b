"""Why the API server would not have a child, in one word that stays and in the server's own. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from inflight_operator.kube import KubeError
from inflight_operator.lifecycle import Cause

MAX_MESSAGE: Final = 2_000
UNREACHABLE: Final = "APIServerUnavailable"
JOBSET_INSTALL: Final = "install JobSet 0.11 or newer (https://jobset.sigs.k8s.io)"
_FORBIDDEN: Final[tuple[tuple[str, str, str], ...]] = (
    ("is being terminated", "NamespaceTerminating", ""),
    ("exceeded quota", "QuotaExceeded", ""),
    ("failed quota", "QuotaExceeded", "the quota asks for requests and limits on every container"),
    (
        r"(minimum|maximum) .* usage per|(cpu|memory|storage) max limit to request ratio per",
        "LimitRangeViolated",
        "ask for less, or for more, in spec.<role>.resources or storage.size",
    ),
    (r"violates PodSecurity", "PodSecurityViolated", "mend the role's podTemplate"),
    (
        r"ValidatingAdmissionPolicy|admission webhook|denied the request|denied request",
        "AdmissionDenied",
        "",
    ),
    (r"cannot (create|get|list|patch|delete|update|watch) resource", "PermissionDenied", "apply manifests/ again"),
    (r"cannot set blockOwnerDeletion", "PermissionDenied", "apply manifests/ again"),
)


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
        return Refusal(Cause(UNREACHABLE, f"{what}: the API server does not answer"), passing=True)
    if error.passing:
        return Refusal(_cause("APIServerUnavailable", what, error), passing=True)
    if error.status == 404:
        if kind == "JobSet":
            return Refusal(Cause("JobSetMissing", f"{what}: the cluster has no JobSet; {JOBSET_INSTALL}"))
        return Refusal(_cause("NotFound", what, error))
    if error.status == 403:
        for pattern, reason, remedy in _FORBIDDEN:
            if re.search(pattern, error.message):
                return Refusal(_cause(reason, what, error, remedy), passing=reason == "NamespaceTerminating")
        return Refusal(_cause("Forbidden", what, error))
    if "admission webhook" in error.message or "denied the request" in error.message:
        return Refusal(_cause("AdmissionDenied", what, error))
    if error.status in (400, 422):
        unknown = re.search(r"unknown field|Unsupported value|field not declared in schema", error.message)
        if unknown and kind == "JobSet" and "template.spec.template" not in error.message:
            return Refusal(_cause("JobSetTooOld", what, error, JOBSET_INSTALL))
        if kind == "PersistentVolumeClaim":
            return Refusal(_cause("ClaimRefused", what, error))
        remedy = "suspend the job and mend the role's podTemplate or resources"
        return Refusal(_cause("InvalidPodTemplate", what, error, remedy), stalled=True)
    return Refusal(_cause(error.reason or "Refused", what, error))


def shortened(text: str, limit: int = MAX_MESSAGE) -> str:
    """A message of bearable length in one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _cause(reason: str, what: str, error: KubeError, remedy: str = "") -> Cause:
    words = error.message or error.reason
    return Cause(reason, shortened(f"{what}: {words}" + (f"; {remedy}" if remedy else "")))
