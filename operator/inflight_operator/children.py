"""What has to be done about one child. Pure: the child as built and the object as it was last seen in, one step out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from inflight_operator import names
from inflight_operator.builders import Child, Manifest
from inflight_operator.drift import drift, quantity
from inflight_operator.lifecycle import Cause
from inflight_operator.refusals import Refusal
from inflight_runtime.api import KIND

Verb = Literal["create", "apply", "patch", "delete", "wait", "refuse", "leave"]
MODEL_RETRY: Final = "suspend the job and resume it to try again"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do about a child.

    Attributes:
        verb: what to do; ``wait`` and ``refuse`` do nothing now, ``leave`` because all is well.
        body: manifest to create or apply, or a merge patch.
        refusal: for ``wait`` and ``refuse``: why.
        note: which field differs, for the log.
    """

    verb: Verb
    body: Manifest | None = None
    refusal: Refusal | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Owner:
    """The job a child should belong to.

    Attributes:
        name: of the job.
        uid: of the job.
        start: number of its current start.
        resume_from: ``spec.checkpoint.resumeFrom``.
        trainer_pods: trainer pods that have not ended; ``None`` when nobody has looked.
    """

    name: str
    uid: str
    start: int
    resume_from: str | None = None
    trainer_pods: int | None = None


def stamped(manifest: Manifest, start: int) -> Manifest:
    """The manifest with the number of the start that it is written for."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.START_ANNOTATION: str(start)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def start_of(live: Manifest) -> str:
    """Number of the start that an object was last written for."""
    return str((live["metadata"].get("annotations") or {}).get(names.START_ANNOTATION, ""))


def belongs_to(live: Manifest, uid: str) -> bool:
    """Whether the job with this uid owns an object."""
    return any(owner.get("uid") == uid for owner in live["metadata"].get("ownerReferences") or [])


def next_step(child: Child, live: Manifest | None, owner: Owner) -> Step:
    """What to do about a child of a running job.

    Args:
        child: as it was built.
        live: as it was last seen; ``None`` when there is none.
        owner: its job.
    """
    if live is None:
        if child.kind == "JobSet" and owner.trainer_pods != 0:
            return _wait("WaitingForDeletion", "pods of an earlier trainer must be gone before there is another one")
        return Step("create", stamped(child.manifest, owner.start))
    if (problem := _not_ours(child, live, owner)) is not None:
        return problem
    if child.kind == "JobSet":
        return _job_set_step(child, live, owner)
    if child.kind == "Job":
        return _model_step(child, live, owner)
    if child.kind == "PersistentVolumeClaim":
        return _claim_step(child, live, owner)
    manifest = stamped(child.manifest, owner.start)
    replicas = live.get("spec", {}).get("replicas")
    scaled = "replicas" in manifest.get("spec", {})
    if start_of(live) != str(owner.start):
        return Step("apply", manifest, note="a new start")
    if _hash(live) != _hash(child.manifest):
        # Rendered by another version or under other settings: that waits for the next start.
        return _scale(child, live) if scaled else Step("leave")
    if scaled and not child.replicas_are_ours:
        # To leave the number out of an apply would reset it to 1.
        manifest = _with_replicas(manifest, replicas)
    manifest = _with_revision(manifest, live)
    differs = drift(manifest, live)
    if not differs:
        return Step("leave")
    if scaled and not drift(_with_replicas(manifest, replicas), live):
        return _scale(child, live)
    return Step("apply", manifest, note=differs)


def stop_step(live: Manifest) -> Step:
    """What to do about a workload whose role should have no pods."""
    spec = live.get("spec", {})
    if live["metadata"].get("deletionTimestamp"):
        return Step("leave")
    if live["kind"] == "JobSet":
        return Step("leave") if spec.get("suspend") else Step("patch", _guarded(live, {"suspend": True}))
    if live["kind"] == "Job":
        return Step("leave") if job_ended(live) else Step("delete")
    return Step("leave") if spec.get("replicas") == 0 else Step("patch", _guarded(live, {"replicas": 0}))


def job_ended(job: Manifest) -> str:
    """``Complete`` or ``Failed`` for a batch Job that has ended, else an empty string."""
    return _first_true(job, "Complete", "Failed")


def job_set_ended(job_set: Manifest) -> str:
    """``Completed`` or ``Failed`` for a JobSet that has ended, else an empty string."""
    return _first_true(job_set, "Completed", "Failed")


def model_fetched(job: Manifest, owner: Owner) -> bool:
    """Whether the Job that fetches the model has done so for this start."""
    return job_ended(job) == "Complete" and start_of(job) == str(owner.start)


def going(what: str, live: Manifest, uid: str) -> Refusal | None:
    """Why an object must be waited for: it is being deleted, or will be with the job of this name before.

    Args:
        what: kind and name, for the message.
        live: the object.
        uid: of the job that wants one of this name.
    """
    metadata = live["metadata"]
    if metadata.get("deletionTimestamp"):
        message = f"{what} is being deleted; it is made anew when it has gone"
    elif any(one.get("kind") == KIND and one.get("uid") != uid for one in metadata.get("ownerReferences") or []):
        message = f"{what} belongs to a job of this name that was deleted, and will go too"
    else:
        return None
    return Refusal(Cause("WaitingForDeletion", message), passing=True)


def taken(what: str, live: Manifest, uid: str) -> Refusal | None:
    """Why an object is not to be touched: somebody else's; ``None`` for one of the job with this uid."""
    if belongs_to(live, uid):
        return None
    message = f"{what} exists already and does not belong to this job; delete it or rename the job"
    return Refusal(Cause("NameTaken", message))


def _first_true(live: Manifest, *kinds: str) -> str:
    conditions = (live.get("status") or {}).get("conditions") or []
    true = {one.get("type") for one in conditions if one.get("status") == "True"}
    return next((kind for kind in kinds if kind in true), "")


def _not_ours(child: Child, live: Manifest, owner: Owner) -> Step | None:
    """``None`` when the object is this job's to write."""
    what = f"{child.kind} {child.name}"
    if (refusal := going(what, live, owner.uid)) is not None:
        return Step("wait", refusal=refusal)
    if child.kind == "PersistentVolumeClaim":
        return _claim_problem(child, live, owner)
    refusal = taken(what, live, owner.uid)
    return None if refusal is None else Step("refuse", refusal=refusal)


def _claim_problem(child: Child, live: Manifest, owner: Owner) -> Step | None:
    run = (live["metadata"].get("labels") or {}).get(names.RUN_UID_LABEL)
    if run == owner.uid:
        return None
    if not run:
        message = f"claim {child.name} exists already and is not Inflight's; delete it, or name it as claimName"
        return Step("refuse", refusal=Refusal(Cause("NameTaken", message)))
    directory = f"{owner.name}-{run[:8]}"
    if owner.resume_from is not None and owner.resume_from.strip("/").split("/")[0] == directory:
        return None
    message = (
        f"claim {child.name} holds the checkpoints of another run ({run}); to go on from them suspend the "
        f"job, set spec.checkpoint.resumeFrom to {directory}/checkpoints and resume it; to drop them delete the claim"
    )
    return Step("refuse", refusal=Refusal(Cause("VolumeBelongsToAnotherRun", message)))


def _job_set_step(child: Child, live: Manifest, owner: Owner) -> Step:
    """JobSets cannot be changed: suspended ones are resumed, and made anew when they should look different.

    One that has counted restarts is made anew as well, since a resume gives all of them back.
    """
    if start_of(live) == str(owner.start):
        return Step("leave")
    spent = (live.get("status") or {}).get("restarts", 0) > 0 or job_set_ended(live)
    if _hash(live) == _hash(child.manifest) and not spent:
        patch = _guarded(live, {"suspend": False})
        patch["metadata"]["annotations"] = {names.START_ANNOTATION: str(owner.start)}
        return Step("patch", patch, note="a new start")
    if not live["spec"].get("suspend") and not job_set_ended(live):
        return Step("patch", _guarded(live, {"suspend": True}), note="to be made anew")
    if owner.trainer_pods != 0:
        return _wait("WaitingForDeletion", "the trainer's last pods must be gone before it is made anew")
    return Step("delete", note="to be made anew")


def _model_step(child: Child, live: Manifest, owner: Owner) -> Step:
    ended = job_ended(live)
    if start_of(live) == str(owner.start):
        if ended != "Failed":
            return Step("leave")
        conditions = live["status"]["conditions"]
        words = next((one.get("message", "") for one in conditions if one.get("type") == "Failed"), "")
        message = f"the model could not be fetched: {words}; look at the logs of Job {child.name}; {MODEL_RETRY}"
        return Step("refuse", refusal=Refusal(Cause("ModelFetchFailed", message), stalled=True))
    if ended == "Failed" or _hash(live) != _hash(child.manifest):
        return Step("delete", note="to be made anew")
    return Step("patch", _guarded(live, None, {names.START_ANNOTATION: str(owner.start)}))


def _claim_step(child: Child, live: Manifest, owner: Owner) -> Step:
    """Claims keep their spec; a start makes one larger when the job asks for more. Somebody may have grown it since."""
    fresh = start_of(live) != str(owner.start)
    manifest = stamped(child.manifest, owner.start)
    metadata = (manifest if fresh else _with_revision(manifest, live))["metadata"]
    wanted = {"metadata": {name: metadata[name] for name in ("labels", "annotations")}}
    owners = metadata.get("ownerReferences", [])
    owned = belongs_to(live, owner.uid)
    rendered_alike = _hash(live) == _hash(child.manifest)
    if not fresh and (not rendered_alike or (not drift(wanted, live) and owned == bool(owners))):
        return Step("leave")
    patch = _guarded(live, None)
    patch["metadata"] |= {**wanted["metadata"], "ownerReferences": owners}
    asked = child.manifest["spec"]["resources"]["requests"]["storage"]
    has = live["spec"].get("resources", {}).get("requests", {}).get("storage", "0")
    if fresh and (quantity(asked) or 0) > (quantity(has) or 0):
        patch["spec"] = {"resources": {"requests": {"storage": asked}}}
    return Step("patch", patch, note="a new start" if fresh else "metadata")


def _scale(child: Child, live: Manifest) -> Step:
    wanted = child.manifest["spec"]["replicas"]
    if not child.replicas_are_ours or live["spec"].get("replicas") == wanted:
        return Step("leave")
    return Step("patch", _guarded(live, {"replicas": wanted}), note="spec.replicas")


def _with_replicas(manifest: Manifest, replicas: Any) -> Manifest:
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}


def _with_revision(manifest: Manifest, live: Manifest) -> Manifest:
    """The manifest as by the builders that made the object: the same result of newer ones is no news."""
    metadata = manifest["metadata"]
    revision = (live["metadata"].get("annotations") or {}).get(names.REVISION_ANNOTATION)
    annotations = metadata["annotations"] | ({} if revision is None else {names.REVISION_ANNOTATION: revision})
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _guarded(live: Manifest, spec: Manifest | None, annotations: dict[str, str] | None = None) -> Manifest:
    """A merge patch that touches this very object only."""
    metadata: Manifest = {"uid": live["metadata"]["uid"]}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, **({"spec": spec} if spec is not None else {})}


def _hash(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(names.HASH_ANNOTATION, ""))


def _wait(reason: str, message: str) -> Step:
    return Step("wait", refusal=Refusal(Cause(reason, message), passing=True))
