"""Every reason that a condition of a job can have, and what it means. A reason, once published, keeps its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["state", "waits", "mend", "over"]


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason.

    Attributes:
        kind: ``state`` for how things are; ``waits`` for what passes by itself; ``mend`` for what somebody has to
            mend, in the cluster or in the job, and that heals by itself then; ``over`` for why a job has failed.
        meaning: in one sentence.
        remedy: what to do about it, for what somebody has to mend.
        stalled: whether no waiting can cure it, so that ``Stalled`` is true.
    """

    kind: Kind
    meaning: str
    remedy: str = ""
    stalled: bool = False


STATES: Final = {
    "Valid": Reason("state", "The spec can be run."),
    "Created": Reason("state", "All children are there."),
    "NotStarted": Reason("state", "The job is suspended and has never run."),
    "CleanedUp": Reason("state", "ttlSecondsAfterFinished has passed; only claims are left."),
    "Reachable": Reason("state", "The coordinator answers the operator."),
    "Unreachable": Reason("state", "The coordinator does not answer the operator; the run goes on all the same."),
    "Ready": Reason("state", "All pods of the role are ready."),
    "NoReplicas": Reason("state", "The role has been scaled to nothing."),
    "NotCreated": Reason("state", "The role's pods are not wanted yet."),
    "NotReady": Reason("waits", "Pods of the role are not ready, and nothing says why."),
    "Running": Reason("state", "Every role is at work."),
    "Suspended": Reason("state", "No pod is left; the claims are kept."),
    "NotSuspended": Reason("state", "The job is not suspended."),
    "Succeeded": Reason("state", "The trainer has done all steps."),
    "Finished": Reason("state", "The run has ended, and with it the role."),
    "Failed": Reason("over", "The run has failed.", stalled=True),
}
WAITS: Final = {
    "Starting": Reason("waits", "All children are there, and their pods are starting."),
    "Suspending": Reason("waits", "Roles are being stopped, one after another."),
    "Completing": Reason("waits", "The trainer has done all steps, and the other roles end."),
    "FetchingModel": Reason("waits", "A Job fetches the model; the roles that need it are made afterwards."),
    "WaitingForDeletion": Reason("waits", "An object of an earlier run, or one to be made anew, has not gone yet."),
    "NamespaceTerminating": Reason("waits", "The namespace is being deleted: nothing can be made in it."),
    "APIServerUnavailable": Reason("waits", "The API server did not answer, or with an error of its own."),
    "Conflict": Reason("waits", "Somebody else writes the same object again and again."),
}
MENDS: Final = {
    "InvalidSpec": Reason("mend", "The spec breaks a rule that the API server cannot check.", "Mend it.", stalled=True),
    "QueueNotSupported": Reason(
        "mend", "The job carries a queue's label, and queues are not supported.", "Remove the label.", stalled=True
    ),
    "InvalidPodTemplate": Reason(
        "mend",
        "A role's pods would be invalid, most likely by its podTemplate or resources.",
        "Suspend the job, mend the role and resume it.",
        stalled=True,
    ),
    "ModelFetchFailed": Reason(
        "mend",
        "The Job that fetches the model has failed for good.",
        "Look at its logs, mend the cause, suspend the job and resume it.",
        stalled=True,
    ),
    "ConfigMapNotFound": Reason("mend", "The ConfigMap with the environment is not there.", "Create it."),
    "QuotaExceeded": Reason("mend", "A ResourceQuota leaves no room for an object or a pod.", "Raise it, or ask less."),
    "QuotaUnknown": Reason("waits", "A ResourceQuota has not been counted yet."),
    "LimitRangeViolated": Reason(
        "mend", "A LimitRange forbids what a pod or claim asks for.", "Ask for something else."
    ),
    "PodSecurityViolated": Reason(
        "mend",
        "A role's overlay breaks the namespace's pod security.",
        "Mend the podTemplate, or relabel the namespace.",
    ),
    "AdmissionDenied": Reason("mend", "A policy or webhook of the cluster refused an object.", "Ask who set it up."),
    "WebhookUnavailable": Reason("mend", "A webhook of the cluster does not answer.", "Mend or remove the webhook."),
    "PermissionDenied": Reason("mend", "The operator lacks a right.", "Apply manifests/ of this version again."),
    "Forbidden": Reason("mend", "The API server forbids an object, in words of its own.", "Do as its message says."),
    "Refused": Reason("mend", "The API server refuses an object, in words of its own.", "Do as its message says."),
    "NotFound": Reason("mend", "What an object is to be made of is not there.", "Do as the message says."),
    "ClaimRefused": Reason("mend", "A PersistentVolumeClaim is invalid or cannot grow.", "Mend the job's storage."),
    "ClaimPending": Reason(
        "mend", "A PersistentVolumeClaim has no volume.", "Mend the storage class or its provisioner."
    ),
    "InternalError": Reason("mend", "The operator itself has a fault, which this job shows.", "Report it."),
    "NameTaken": Reason(
        "mend", "An object of a child's name exists and is somebody else's.", "Delete it, or rename the job."
    ),
    "VolumeBelongsToAnotherRun": Reason(
        "mend", "A claim holds the data of another run.", "Name it in resumeFrom, or delete the claim."
    ),
    "TokenUnreadable": Reason("mend", "The job's Secret holds no token.", "Delete it; a new one is made."),
    "JobSetMissing": Reason("mend", "JobSet is not installed.", "Install JobSet 0.11 or newer."),
    "JobSetTooOld": Reason("mend", "The installed JobSet does not know a field.", "Install JobSet 0.11 or newer."),
    "SuspendedElsewhere": Reason("mend", "Somebody else has suspended the trainer's JobSet.", "Resume it there."),
    "ImagePullFailed": Reason("mend", "A node cannot have an image.", "Mend its name or the access to its registry."),
    "ContainerCannotStart": Reason("mend", "A node cannot start a container.", "Do as its message says."),
    "Crashing": Reason("mend", "A container ends again and again.", "Look at its logs."),
    "Unschedulable": Reason("mend", "No node has room for a pod, or may take it.", "Add nodes, or ask for less."),
    "PodFailed": Reason("mend", "A pod has ended with an error.", "Look at its logs."),
    "PodsNotCreated": Reason("mend", "A controller cannot make pods.", "Do as its message says."),
    "ServiceAccountMissing": Reason("mend", "The pods' ServiceAccount is not there.", "See who deletes it."),
    "PriorityClassMissing": Reason("mend", "The PriorityClass of the job is not there.", "Create it, or name another."),
}
OVER: Final = {
    "TrainerFailed": Reason("over", "The trainer has failed: on bad input, or too often.", stalled=True),
    "DeadlineExceeded": Reason("over", "The job was active for activeDeadlineSeconds.", stalled=True),
}
REASONS: Final[dict[str, Reason]] = {**STATES, **WAITS, **MENDS, **OVER}
