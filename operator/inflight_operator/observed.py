"""What the children's own status says: counts, restarts, how the trainer is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight_operator import names
from inflight_operator.builders import Manifest, pod_template_of, role_of
from inflight_operator.children import belongs_to, job_ended, job_set_ended, start_of
from inflight_operator.lifecycle import STOP_ORDER, Trainer, parse_time
from inflight_runtime.api import RLTrainingJob
from inflight_runtime.api.status import JobStatus, RoleStatus


def trainer_of(children: Sequence[Manifest], status: JobStatus) -> Trainer:
    """State of the trainer's JobSet among a job's children.

    A failure counts only of a JobSet that should run: whatever a trainer ends with that is told to stop, a resume gives
    it another try.
    """
    job_set = _job_set(children)
    if job_set is None:
        return Trainer()
    suspended = bool(job_set["spec"].get("suspend"))
    # Suspended by us it is until the patch of this start; what comes later is somebody else's.
    of_this_start = start_of(job_set) == str(status.starts)
    stopped = not of_this_start or (suspended and status.phase in ("Suspending", "Suspended"))
    for condition in (job_set.get("status") or {}).get("conditions") or []:
        succeeded = condition.get("type") == "Completed"
        failed = condition.get("type") == "Failed" and not stopped
        if condition.get("status") == "True" and (succeeded or failed):
            ended = parse_time(str(condition.get("lastTransitionTime", "")))
            return Trainer(True, suspended and of_this_start, ended, succeeded, str(condition.get("message", "")))
    return Trainer(True, suspended and of_this_start)


def settled_of(children: Sequence[Manifest], jobs: Sequence[Manifest]) -> frozenset[str]:
    """Roles that have been stopped and whose controllers have seen it: none of these gets another pod.

    Without this, a list of pods from just before a controller made one would pass for the end.

    Args:
        children: the job's own.
        jobs: batch Jobs with the job's labels, the trainer's among them.
    """
    restless = {role_of(child) for child in children if not _settled(child, jobs)}
    return frozenset({*STOP_ORDER, names.MODEL} - restless)


def counts_of(children: Sequence[Manifest], jobs: Sequence[Manifest], job: RLTrainingJob) -> dict[str, RoleStatus]:
    """Desired and ready pods of each role.

    Args:
        children: the job's own, without those being deleted.
        jobs: batch Jobs with the job's labels, the trainer's among them: a JobSet counts Jobs, not pods.
        job: the job.
    """
    counts: dict[str, RoleStatus] = {}
    for child in children:
        status: dict[str, Any] = child.get("status") or {}
        if child["kind"] in ("StatefulSet", "Deployment"):
            desired = child["spec"].get("replicas", 1)
            ready = status.get("readyReplicas", 0)
            counts[role_of(child)] = RoleStatus(desired=desired, ready=min(desired, ready))
        elif child["kind"] == "Job" and role_of(child) == names.MODEL and not job_ended(child):
            counts[names.MODEL] = RoleStatus(desired=1, ready=min(1, status.get("ready", 0)))
    job_set = _job_set(children)
    if job_set is not None:
        desired = 0 if job_set_ended(job_set) or job_set["spec"].get("suspend") else job.spec.trainer.nodes
        ready = sum(
            (one.get("status") or {}).get("ready", 0)
            for one in jobs
            if not one["metadata"].get("deletionTimestamp") and belongs_to(one, job_set["metadata"]["uid"])
        )
        counts[names.TRAINER] = RoleStatus(desired=desired, ready=min(desired, ready))
    return counts


def restarts_of(children: Sequence[Manifest], status: JobStatus) -> int:
    """Restarts of the trainer, as its JobSet counts them."""
    job_set = _job_set(children)
    if job_set is None:
        return status.restarts
    return int((job_set.get("status") or {}).get("restarts", 0))


def grace_of(children: Sequence[Manifest]) -> dict[str, float]:
    """Grace period of each role's pods, in seconds."""
    found: dict[str, float] = {}
    for child in children:
        if (template := pod_template_of(child)) is not None:
            found[role_of(child)] = float(template["spec"].get("terminationGracePeriodSeconds", 30))
    return found


def _settled(child: Manifest, jobs: Sequence[Manifest]) -> bool:
    metadata, spec, status = child["metadata"], child.get("spec") or {}, child.get("status") or {}
    if child["kind"] in ("StatefulSet", "Deployment"):
        seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
        return spec.get("replicas") == 0 and seen and not status.get("replicas")
    if child["kind"] == "JobSet":
        own = [one for one in jobs if belongs_to(one, metadata["uid"]) and not job_ended(one)]
        paused = all(one["spec"].get("suspend") and not (one.get("status") or {}).get("active") for one in own)
        # Its own condition says nothing more, and never comes where its controller cannot even make a Service.
        return bool(job_set_ended(child)) or (bool(spec.get("suspend")) and paused)
    return True


def _job_set(children: Sequence[Manifest]) -> Manifest | None:
    return next((child for child in children if child["kind"] == "JobSet"), None)
