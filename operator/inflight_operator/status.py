"""The status of a job from what was found. Pure.

Messages hold no times and no counters of attempts: a status that says the same is the same, and is not written again.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from inflight_operator import names
from inflight_operator.lifecycle import OVER, Cause, Plan, Trainer, active_seconds, format_time
from inflight_operator.progress import LATE, Reading
from inflight_operator.refusals import Refusal
from inflight_runtime.api.enums import ConditionStatus, Phase
from inflight_runtime.api.status import Condition, Endpoints, JobStatus, Progress, RoleStatus, ScalableRoleStatus

ROLE_CONDITIONS: Final = {
    names.INFERENCE: "InferenceReady",
    names.ACTOR: "ActorsReady",
    names.TRAINER: "TrainerRunning",
}
ELSEWHERE: Final = Cause("SuspendedElsewhere", "somebody else has suspended the trainer's JobSet; resume it there")
WAITED_FOR: Final = (names.COORDINATOR, names.TRAINER, names.INFERENCE, names.ACTOR)


_Wanted = tuple[str, ConditionStatus, Cause]
"""Type, status and the rest of a condition."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of a job.

    Attributes:
        plan: what is being done.
        generation: of the spec it was done for.
        counts: desired and ready pods of each role.
        trainer: the JobSet.
        problem: what is in the way of its children; ``None`` when all are there.
        invalid: why the spec cannot be run at all.
        causes: why a role's pods are not there or not ready.
        waits_for_model: whether the model is still being fetched.
        restarts: of the trainer.
        gpus: that all roles ask for.
        reading: of the coordinator.
        failure: why the job has failed, better than the plan knows.
        endpoints: addresses, once the children are there.
    """

    plan: Plan
    generation: int
    counts: Mapping[str, RoleStatus] = field(default_factory=dict)
    trainer: Trainer = field(default_factory=Trainer)
    problem: Refusal | None = None
    invalid: Cause | None = None
    causes: Mapping[str, Cause] = field(default_factory=dict)
    waits_for_model: bool = False
    restarts: int = 0
    gpus: int = 0
    reading: Reading | None = None
    failure: Cause | None = None
    endpoints: Endpoints = field(default_factory=Endpoints)


def begun(old: JobStatus, now: datetime.datetime, frozen: Mapping[str, Any]) -> JobStatus:
    """The status at a new start, to be written before any child is.

    Args:
        old: the status so far.
        now: the time.
        frozen: what the start is rendered from: ``images``, ``builder_revision`` and the two ``*_at_start`` counts.
    """
    return old.model_copy(
        update={
            "phase": "Pending",
            "starts": old.starts + 1,
            "start_time": old.start_time or format_time(now),
            "active_since": old.active_since or format_time(now),
            "suspending_since": "",
            "images": dict(frozen["images"]),
            "builder_revision": frozen["builder_revision"],
            "inference": old.inference.model_copy(update={"replicas_at_start": frozen["servers_at_start"]}),
            "actors": old.actors.model_copy(update={"replicas_at_start": frozen["actors_at_start"]}),
        }
    )


def left(old: JobStatus, plan: Plan, now: datetime.datetime, replicas: Mapping[str, int | None]) -> JobStatus:
    """The status when a job stops being active, to be written before any child is touched.

    Args:
        old: the status so far.
        plan: that it stops by.
        now: the time.
        replicas: counts to go back to at resume, of the roles that have any.
    """
    counts = {
        name: role.model_copy(update={"replicas_before_suspend": replicas[label]})
        for name, label, role in (("inference", names.INFERENCE, old.inference), ("actors", names.ACTOR, old.actors))
        if replicas.get(label) is not None
    }
    return old.model_copy(
        update={
            "phase": plan.phase,
            "active_seconds": int(active_seconds(old, now)),
            "active_since": "",
            "suspending_since": format_time(now) if plan.phase == "Suspending" else "",
            **counts,
        }
    )


def new_status(job: str, old: JobStatus, found: Found, now: datetime.datetime) -> JobStatus:
    """The status that tells what was found.

    Args:
        job: its name.
        old: the status so far.
        found: the findings.
        now: the time.
    """
    phase = _phase(old, found)
    over = phase in OVER
    none = RoleStatus()
    counts = found.counts
    inference = counts.get(names.INFERENCE, none)
    actors = counts.get(names.ACTOR, none)
    update: dict[str, Any] = {
        "phase": phase,
        "observed_generation": found.generation,
        "coordinator": counts.get(names.COORDINATOR, none),
        "trainer": counts.get(names.TRAINER, none),
        "inference": _scalable(job, names.INFERENCE, old.inference, inference),
        "actors": _scalable(job, names.ACTOR, old.actors, actors),
        "restarts": found.restarts,
        "gpus": found.gpus,
        "endpoints": Endpoints() if over else found.endpoints,
        "progress": _progress(old.progress, found.reading),
    }
    if over and not old.completion_time:
        ended = found.trainer.ended or now
        update["completion_time"] = format_time(ended)
    new = old.model_copy(update=update)
    return new.model_copy(update={"conditions": _conditions(old, new, found, now)})


def troubled(old: JobStatus, cause: Cause, generation: int, now: datetime.datetime) -> JobStatus:
    """The status when the work could not be gone through with: as it was, but not ready.

    Args:
        old: the status so far.
        cause: what was in the way.
        generation: of the spec.
        now: the time.
    """
    wanted: list[_Wanted] = [("Ready", "False", cause), ("Reconciling", "True", cause)]
    kept = [one for one in old.conditions if one.type not in ("Ready", "Reconciling", "Stalled")]
    conditions = [*kept, *(_condition(old, one, generation, now) for one in wanted)]
    return old.model_copy(update={"phase": old.phase or "Pending", "conditions": conditions})


def wire(status: JobStatus) -> dict[str, Any]:
    """The status as the API has it, without what says nothing."""
    data = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: value for name, value in _without_empty_text(data).items() if value != {}}


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """JSON merge patch (RFC 7386) that makes ``new`` of ``old``; empty when they are the same."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old:
            patch[name] = value
        elif old[name] != value:
            both = isinstance(value, dict) and isinstance(old[name], dict)
            patch[name] = merge_patch(old[name], value) if both else value
    return patch


def condition(status: JobStatus, kind: str) -> Condition | None:
    """A status's condition of a type."""
    return next((one for one in status.conditions if one.type == kind), None)


def _phase(old: JobStatus, found: Found) -> Phase:
    plan = found.plan
    if found.invalid is not None and not old.starts:
        return "Pending"
    if not plan.run:
        return plan.phase
    if old.phase == "Running":
        return "Running"
    if found.problem is not None or found.waits_for_model:
        return "Pending"
    return "Running" if _all_begun(found) else "Starting"


def _all_begun(found: Found) -> bool:
    """Whether every role does its work, servers and actors with one of theirs at least."""
    none = RoleStatus()
    trainer = found.counts.get(names.TRAINER, none)
    others = [found.counts.get(role, none) for role in (names.COORDINATOR, names.INFERENCE, names.ACTOR)]
    return 0 < trainer.desired <= trainer.ready and all(role.ready >= min(1, role.desired) for role in others)


def _scalable(job: str, role: str, old: ScalableRoleStatus, now: RoleStatus) -> ScalableRoleStatus:
    selector = names.selector_text(job, role)
    return old.model_copy(update={"desired": now.desired, "ready": now.ready, "selector": selector})


def _progress(old: Progress | None, reading: Reading | None) -> Progress | None:
    new = None if reading is None else reading.progress
    if new is None:
        return old
    if old is not None and old == new.model_copy(update={"updated_time": old.updated_time}):
        return old
    return new


def _conditions(old: JobStatus, new: JobStatus, found: Found, now: datetime.datetime) -> list[Condition]:
    assert new.phase is not None
    wanted: list[_Wanted] = [_validated(found)]
    if found.invalid is None:
        wanted += [_created(new, found), *_reachable(old, new.phase, found)]
    wanted += [_role(role, new.phase, found) for role in ROLE_CONDITIONS]
    failure = _failure(old, found)
    wanted += _ends(new.phase, found, failure)
    wanted += _kstatus(new, found, failure)
    return [_condition(old, one, found.generation, now) for one in wanted]


def _condition(old: JobStatus, wanted: _Wanted, generation: int, now: datetime.datetime) -> Condition:
    kind, state, cause = wanted
    before = condition(old, kind)
    same = before is not None and before.status == state
    since = before.last_transition_time if before is not None and same else format_time(now)
    return Condition(
        type=kind,
        status=state,
        reason=cause.reason,
        message=cause.message,
        last_transition_time=since,
        observed_generation=generation,
    )


def _validated(found: Found) -> _Wanted:
    if found.invalid is not None:
        return "Validated", "False", found.invalid
    return "Validated", "True", Cause("Valid", "")


def _created(new: JobStatus, found: Found) -> _Wanted:
    kind = "ResourcesCreated"
    if found.problem is not None:
        return kind, "False", found.problem.cause
    if not new.starts:
        return kind, "False", Cause("NotStarted", "the job is suspended and has never run")
    if found.plan.clean:
        return kind, "False", Cause("CleanedUp", "ttlSecondsAfterFinished has passed; claims are kept")
    if found.waits_for_model:
        return kind, "False", Cause("FetchingModel", "roles are made when the model has been fetched")
    return kind, "True", Cause("Created", "")


def _reachable(old: JobStatus, phase: Phase, found: Found) -> list[_Wanted]:
    kind, reading = "CoordinatorReachable", found.reading
    before = condition(old, kind)
    if phase not in ("Starting", "Running"):
        return []
    if reading is None:
        if before is None or not found.counts.get(names.COORDINATOR, RoleStatus()).ready:
            return []
        # An operator that has just been started has not asked yet, which is no news.
        return [(kind, before.status, Cause(before.reason, before.message))]
    if reading.error:
        known = before is not None and before.reason == "Unreachable"
        if known and before is not None and reading.error.startswith(LATE):
            # It says less than what is known: no news.
            return [(kind, "False", Cause(before.reason, before.message))]
        return [(kind, "False", Cause("Unreachable", reading.error))]
    return [(kind, "True", Cause("Reachable", ""))]


def _role(role: str, phase: Phase, found: Found) -> _Wanted:
    kind = ROLE_CONDITIONS[role]
    count = found.counts.get(role, RoleStatus())
    if phase in ("Suspending", "Suspended", "Completing", "Succeeded"):
        reason = "Suspended" if phase.startswith("Suspend") else "Finished"
        return kind, "False", Cause(reason, "")
    if role == names.TRAINER and phase == "Failed":
        return kind, "False", Cause("Failed", "")
    if role == names.TRAINER and found.trainer.exists and found.trainer.suspended and phase in ("Starting", "Running"):
        return kind, "False", ELSEWHERE
    if 0 < count.desired <= count.ready:
        return kind, "True", Cause("Ready", f"{count.ready} of {count.desired} ready")
    told = f"{count.ready} of {count.desired} ready"
    if count.desired == 0:
        return kind, "False", Cause("NoReplicas" if found.plan.run and found.problem is None else "NotCreated", "")
    cause = found.causes.get(role)
    if cause is None:
        return kind, "False", Cause("NotReady", told)
    return kind, "False", Cause(cause.reason, f"{told}; {cause.message}")


def _failure(old: JobStatus, found: Found) -> Cause:
    before = condition(old, "Failed")
    if old.phase == "Failed" and before is not None:
        return Cause(before.reason, before.message)
    return found.failure or found.plan.failure or Cause("Failed", "")


def _ends(phase: Phase, found: Found, failure: Cause) -> list[_Wanted]:
    suspended = Cause("Suspended", "no pod is left") if phase == "Suspended" else Cause("NotSuspended", "")
    if phase == "Suspending":
        suspended = Cause("Suspending", found.plan.waits_for)
    wanted: list[_Wanted] = [("Suspended", "True" if phase == "Suspended" else "False", suspended)]
    if phase == "Succeeded":
        wanted.append(("Complete", "True", Cause("Succeeded", "the trainer has done all steps")))
    elif phase == "Failed":
        wanted.append(("Failed", "True", failure))
    return wanted


def _kstatus(new: JobStatus, found: Found, failure: Cause) -> list[_Wanted]:
    """``Ready``, and while they are true ``Reconciling`` or ``Stalled``, by the rules of kstatus."""
    ready, cause, stalled = _ready(new, found, failure)
    wanted: list[_Wanted] = [("Ready", "True" if ready else "False", cause)]
    if stalled:
        wanted.append(("Stalled", "True", cause))
    elif not ready:
        wanted.append(("Reconciling", "True", cause))
    return wanted


def _ready(new: JobStatus, found: Found, failure: Cause) -> tuple[bool, Cause, bool]:
    phase = new.phase
    assert phase is not None
    if found.invalid is not None and phase not in OVER:
        return False, found.invalid, True
    if phase in ("Succeeded", "Suspended"):
        return True, Cause(phase, ""), False
    if phase == "Failed":
        return False, failure, True
    if phase in ("Suspending", "Completing"):
        return False, Cause(phase, found.plan.waits_for), False
    if found.problem is not None:
        return False, found.problem.cause, found.problem.stalled
    if found.waits_for_model:
        return False, found.causes.get(names.MODEL) or Cause("FetchingModel", "the model is being fetched"), False
    if found.trainer.exists and found.trainer.suspended:
        return False, ELSEWHERE, False
    for role in WAITED_FOR:
        count = found.counts.get(role, RoleStatus())
        if count.desired and count.ready < (count.desired if role == names.TRAINER else 1):
            missing = found.causes.get(role) or Cause(
                phase if phase == "Starting" else "NotReady", f"{role} is not ready"
            )
            return False, missing, False
    if phase != "Running":
        return False, Cause(phase, ""), False
    return True, Cause("Running", ""), False


def _without_empty_text(data: dict[str, Any]) -> dict[str, Any]:
    kept = {name: _without_empty_text(value) if isinstance(value, dict) else value for name, value in data.items()}
    return {name: value for name, value in kept.items() if value != ""}
