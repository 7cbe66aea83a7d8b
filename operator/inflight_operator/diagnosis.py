"""What keeps pods from being there or ready, from the pods themselves and from the events of what makes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from inflight_operator.builders import Manifest, role_of
from inflight_operator.lifecycle import Cause
from inflight_operator.refusals import shortened

IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
WAITING_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
CRASHES: Final = "CrashLoopBackOff"
EFFECTS: Final = frozenset({1, 143})
"""Exit codes of a trainer node that has lost another one, or that was told to end because another one had failed."""
MAX_WORDS: Final = 1_000
_SECOND: Final = len("2006-01-02T15:04:05")
_REFUSED_PODS: Final = (
    ("exceeded quota|failed quota", "QuotaExceeded"),
    (r"(minimum|maximum) .* usage per|limit to request ratio", "LimitRangeViolated"),
    ("violates PodSecurity", "PodSecurityViolated"),
    ("(?i)service ?account .*not found", "ServiceAccountMissing"),
    ("no PriorityClass with name", "PriorityClassMissing"),
    ("failed calling webhook", "WebhookUnavailable"),
    ("denied", "AdmissionDenied"),
    ("is invalid:", "InvalidPodTemplate"),
)
ORDER: Final = (
    "ImagePullFailed",
    "ContainerCannotStart",
    "Crashing",
    "Unschedulable",
    "PodFailed",
)
"""Which of several causes is told: what a person has to mend comes before what may pass."""


def pods_left(pods: Iterable[Manifest]) -> dict[str, int]:
    """Pods of each role that have not ended, those being deleted included."""
    left: dict[str, int] = {}
    for pod in pods:
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            left[role_of(pod)] = left.get(role_of(pod), 0) + 1
    return left


def pod_causes(pods: Sequence[Manifest]) -> dict[str, Cause]:
    """For each role the most telling reason why one of its pods is not ready; roles without trouble are left out."""
    found: dict[str, list[Cause]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        cause = _pod_cause(pod)
        if cause is not None:
            found.setdefault(role_of(pod), []).append(cause)
    return {role: min(causes, key=lambda cause: ORDER.index(cause.reason)) for role, causes in found.items()}


def creation_cause(events: Sequence[Manifest]) -> Cause | None:
    """Why a controller could not make pods, from the events of what it makes them for.

    Args:
        events: of one StatefulSet, ReplicaSet or Job.
    """
    failed = [event for event in events if event.get("reason") in ("FailedCreate", "JobCreationFailed")]
    if not failed:
        return None
    last = max(failed, key=_last_seen)
    made = [_last_seen(event) for event in events if event.get("reason") == "SuccessfulCreate"]
    if made and max(made)[:_SECOND] > _last_seen(last)[:_SECOND]:
        return None  # it was so once
    words = str(last.get("message", ""))
    return Cause(creation_reason(words), shortened(_without_pod_name(words), MAX_WORDS))


def claim_cause(name: str, events: Sequence[Manifest]) -> Cause | None:
    """Why a claim has no volume, from its events.

    Args:
        name: of the claim.
        events: of it.
    """
    warnings = [event for event in events if event.get("type") == "Warning"]
    if not warnings:
        return None
    words = shortened(str(max(warnings, key=_last_seen).get("message", "")), MAX_WORDS)
    return Cause("ClaimPending", f"claim {name} has no volume: {words}")


def creation_reason(words: str) -> str:
    """One word for the API server's sentence on a pod, or a Job of pods, that it refused."""
    return next((reason for pattern, reason in _REFUSED_PODS if re.search(pattern, words)), "PodsNotCreated")


def replica_failure(deployment: Manifest) -> Cause | None:
    """Why a Deployment could not make pods, by its own condition."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            words = str(condition.get("message", ""))
            return Cause(creation_reason(words), shortened(_without_pod_name(words), MAX_WORDS))
    return None


def failed_pod(pods: Sequence[Manifest], role: str) -> str:
    """What the last of a role's failed pods said, as a sentence; empty when there is none."""
    failed = [pod for pod in pods if role_of(pod) == role and (pod.get("status") or {}).get("phase") == "Failed"]
    if not failed:
        return ""
    # All nodes of a trainer fail with the first one, often within the same second: that one knows why, and the others
    # lost a rank or were told to end.
    first = min(failed, key=lambda pod: (_exit_code(pod) in EFFECTS, _ended(pod), str(pod["metadata"]["name"])))
    status = first["status"]
    name = first["metadata"]["name"]
    for container in _containers(status):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return _sentence(f"pod {name}", ended)
    return shortened(f"pod {name}: {status.get('reason', 'Failed')} {status.get('message', '')}".strip(), MAX_WORDS)


def _pod_cause(pod: Manifest) -> Cause | None:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return None
    if status.get("phase") == "Failed":
        return Cause("PodFailed", failed_pod([pod], role_of(pod)))
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        words = shortened(str(waiting.get("message", "")), MAX_WORDS)
        image = container.get("image", "")
        if reason in IMAGE_REASONS:
            return Cause("ImagePullFailed", f"pod {name} cannot have image {image}: {words or reason}")
        if reason in WAITING_REASONS:
            return Cause("ContainerCannotStart", f"pod {name}: {words or reason}")
        if reason == CRASHES:
            last = (container.get("lastState") or {}).get("terminated") or {}
            return Cause("Crashing", _sentence(f"pod {name} keeps ending", last))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Cause("Unschedulable", f"pod {name}: {shortened(str(condition.get('message', '')), MAX_WORDS)}")
    return None


def _containers(status: Mapping[str, Any]) -> list[Manifest]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _sentence(subject: str, ended: Mapping[str, Any]) -> str:
    code, reason = ended.get("exitCode", "?"), ended.get("reason", "")
    known = f" ({reason})" if reason and reason != "Error" else ""
    words = f": {ended['message'].strip()}" if str(ended.get("message", "")).strip() else ""
    return shortened(f"{subject}: exit code {code}{known}{words}", MAX_WORDS)


def _ended(pod: Manifest) -> str:
    times = [
        str(((container.get("state") or {}).get("terminated") or {}).get("finishedAt", ""))
        for container in _containers(pod.get("status") or {})
    ]
    return max(times, default="")


def _exit_code(pod: Manifest) -> int:
    codes = (
        ((container.get("state") or {}).get("terminated") or {}).get("exitCode", 0)
        for container in _containers(pod.get("status") or {})
    )
    return next((int(code) for code in codes if code), 0)


def _last_seen(event: Manifest) -> str:
    series = event.get("series") or {}
    seen = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((time for time in seen if time), ""))


def _without_pod_name(words: str) -> str:
    """The words without the generated name in them: a new one with every try is no news."""
    return re.sub(r'\bpods? "([^"]+)-[a-z0-9]{5}"', r'pods "\1-..."', words)
