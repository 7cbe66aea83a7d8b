"""What the children's own status says: counts, restarts, how the trainer is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.children import job_ended, start_of
from inflight_operator.lifecycle import Trainer, parse_time
from inflight_runtime.api import RLTrainingJob
from inflight_runtime.api.status import JobStatus, RoleStatus


def role_of(manifest: Manifest) -> str:
    """Role that an object's labels name."""
    return str((manifest["metadata"].get("labels") or {}).get(names.ROLE_LABEL, ""))


def trainer_of(children: Sequence[Manifest], start: int) -> Trainer:
    """State of the trainer's JobSet among a job's children."""
    job_set = _job_set(children)
    if job_set is None:
        return Trainer()
    # Suspended by us it is until the patch of this start; what comes later is somebody else's.
    suspended = bool(job_set["spec"].get("suspend")) and start_of(job_set) == str(start)
    for condition in (job_set.get("status") or {}).get("conditions") or []:
        if condition.get("type") in ("Completed", "Failed") and condition.get("status") == "True":
            ended = parse_time(str(condition.get("lastTransitionTime", "")))
            succeeded = condition["type"] == "Completed"
            return Trainer(True, suspended, ended, succeeded, str(condition.get("message", "")))
    return Trainer(True, suspended)


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
        ended = trainer_of(children, 0).ended is not None
        desired = 0 if ended or job_set["spec"].get("suspend") else job.spec.trainer.nodes
        uid = job_set["metadata"]["uid"]
        ready = sum(
            (one.get("status") or {}).get("ready", 0)
            for one in jobs
            if not one["metadata"].get("deletionTimestamp")
            and any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences") or [])
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
        spec = child.get("spec") or {}
        if child["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        template = spec.get("template")
        if isinstance(template, dict):
            found[role_of(child)] = float(template["spec"].get("terminationGracePeriodSeconds", 30))
    return found


def _job_set(children: Sequence[Manifest]) -> Manifest | None:
    return next((child for child in children if child["kind"] == "JobSet"), None)
