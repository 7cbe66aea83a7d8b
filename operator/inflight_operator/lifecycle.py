"""What a job should do next. Pure: a job's spec and status and the state of its children in, a plan out.

Everything that must outlive the operator stands in the job's status, so that any operator, at any moment, comes to the
same plan.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from inflight_operator import names
from inflight_runtime.api.enums import OnFailure, Phase
from inflight_runtime.api.status import JobStatus

STOP_ORDER: Final = (names.ACTOR, names.TRAINER, names.INFERENCE, names.COORDINATOR)
"""Actors hand back their leases, the trainer leaves a checkpoint, and both need the coordinator for it."""
STOP_MARGIN_S: Final = 15.0
"""What a role gets to stop beyond its pods' grace period, before the next one is stopped all the same."""
END_DEADLINE_S: Final = 120.0
"""Longest time the end of a run waits for pods to be gone."""
LOOK_AGAIN_S: Final = 1.0
OVER: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something is as it is.

    Attributes:
        reason: one word for programs.
        message: a sentence for people.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Trainer:
    """State of the trainer's JobSet.

    Attributes:
        exists: whether there is one.
        suspended: whether it is, by ``spec.suspend``.
        ended: when it completed or failed for good; ``None`` while it has not.
        succeeded: whether it completed.
        message: the JobSet controller's words on its failure.
    """

    exists: bool = False
    suspended: bool = False
    ended: datetime.datetime | None = None
    succeeded: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """What a plan is made from.

    Attributes:
        now: the time.
        suspend: what the spec wants.
        status: the job's status as it was last written.
        trainer: its JobSet.
        pods: pods of each role that have not ended, those being deleted included; ``None`` when nobody has looked
            (:func:`pods_matter`).
        settled: roles whose controllers have seen that they should have no pods.
        grace_s: grace period of each role's pods.
        active_deadline_s: ``lifecycle.activeDeadlineSeconds``.
        ttl_s: ``lifecycle.ttlSecondsAfterFinished``.
        on_failure: ``lifecycle.onFailure``.
    """

    now: datetime.datetime
    suspend: bool
    status: JobStatus
    trainer: Trainer = Trainer()
    pods: Mapping[str, int] | None = None
    settled: frozenset[str] = frozenset()
    grace_s: Mapping[str, float] = field(default_factory=dict)
    active_deadline_s: int | None = None
    ttl_s: int | None = None
    on_failure: OnFailure = "keep"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    Attributes:
        phase: of the job; while ``run`` is true, what it comes to depends on what is found of the children.
        run: all children should be there and as they were rendered at the start.
        begin: this is a new start: freeze what it is rendered from before a child is written.
        leave: the job stops being active: write down how long it was, before a child is touched.
        stopped: roles without pods: replicas 0, the JobSet suspended.
        removed: roles whose workloads are deleted.
        clean: delete everything but claims.
        failure: why the job has failed.
        waits_for: what a suspend or an end is waiting for.
        again_s: seconds until the plan may change without any event.
    """

    phase: Phase
    run: bool = False
    begin: bool = False
    leave: bool = False
    stopped: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    clean: bool = False
    failure: Cause | None = None
    waits_for: str = ""
    again_s: float | None = None


def pods_matter(status: JobStatus, suspend: bool, trainer: Trainer) -> bool:
    """Whether :func:`plan` needs to know which pods are left."""
    if status.phase in OVER:
        return False
    if status.phase == "Completing" or trainer.ended is not None:
        return True
    return suspend and status.starts > 0 and status.phase != "Suspended"


def plan(world: World) -> Plan:
    """The plan for a job; see :class:`World`."""
    status, trainer = world.status, world.trainer
    if status.phase in OVER:
        return _over(world)
    if status.phase == "Completing" or (trainer.ended is not None and trainer.succeeded and status.starts):
        return _completing(world)
    if trainer.ended is not None and status.starts:
        message = trainer.message or "the trainer's JobSet has failed"
        return _failed(world, Cause("TrainerFailed", message))
    if world.suspend:
        return _suspend(world)
    left = _active_time_left(world)
    if left is not None and left <= 0:
        deadline = Cause(
            "DeadlineExceeded", f"the job was active for activeDeadlineSeconds ({world.active_deadline_s})"
        )
        return _failed(world, deadline)
    begin = status.phase in (None, "Suspending", "Suspended") or not status.active_since
    phase: Phase = "Pending" if begin or status.phase is None else status.phase
    return Plan(phase, run=True, begin=begin, again_s=left)


def _suspend(world: World) -> Plan:
    status = world.status
    if not status.starts:
        return Plan("Suspended")
    everything = frozenset({*STOP_ORDER, names.MODEL})
    if status.phase == "Suspended":
        return Plan("Suspended", stopped=everything)
    if status.phase != "Suspending":
        return Plan("Suspending", leave=True, stopped=frozenset({names.ACTOR, names.MODEL}), again_s=LOOK_AGAIN_S)
    since = parse_time(status.suspending_since) or world.now
    pods = world.pods or {}
    left = [role for role in STOP_ORDER if world.pods is None or pods.get(role, 0) or role not in world.settled]
    left += [role for role in pods if role not in STOP_ORDER and pods[role]]
    if not left:
        return Plan("Suspended", stopped=everything)
    stopped, limit = {names.MODEL}, 0.0
    for role in STOP_ORDER:
        stopped.add(role)
        limit += world.grace_s.get(role, 0.0) + STOP_MARGIN_S
        if role in left and (world.now - since).total_seconds() < limit:
            break
    count = pods.get(left[0], 0)
    waits = f"{count} {left[0]} pod{'' if count == 1 else 's'}" if count else f"the {left[0]}'s pods"
    return Plan("Suspending", stopped=frozenset(stopped), waits_for=f"waiting for {waits} to end", again_s=LOOK_AGAIN_S)


def _completing(world: World) -> Plan:
    removed = frozenset({names.ACTOR, names.INFERENCE, names.COORDINATOR})
    ended = world.trainer.ended or world.now
    left = {role: count for role, count in (world.pods or {}).items() if role in removed and count}
    late = (world.now - ended).total_seconds() > END_DEADLINE_S
    begun = world.status.phase == "Completing"
    if begun and world.pods is not None and (not left or late):
        return Plan("Succeeded", removed=removed)
    waits = ", ".join(f"{count} {role}" for role, count in sorted(left.items()))
    message = f"waiting for pods to end: {waits}" if waits else ""
    return Plan("Completing", leave=not begun, removed=removed, waits_for=message, again_s=LOOK_AGAIN_S)


def _failed(world: World, cause: Cause) -> Plan:
    removed = _removed_after_failure(world.on_failure, cause.reason)
    return Plan("Failed", leave=True, removed=removed, failure=cause)


def _over(world: World) -> Plan:
    status = world.status
    assert status.phase is not None
    removed = frozenset({names.ACTOR, names.INFERENCE, names.COORDINATOR})
    if status.phase == "Failed":
        reason = next((one.reason for one in status.conditions if one.type == "Failed"), "")
        removed = _removed_after_failure(world.on_failure, reason)
    ended = parse_time(status.completion_time)
    if world.ttl_s is None or ended is None:
        return Plan(status.phase, removed=removed)
    left = world.ttl_s - (world.now - ended).total_seconds()
    if left > 0:
        return Plan(status.phase, removed=removed, again_s=left)
    return Plan(status.phase, removed=removed, clean=True)


def _removed_after_failure(on_failure: OnFailure, reason: str) -> frozenset[str]:
    everything = frozenset({names.ACTOR, names.INFERENCE, names.COORDINATOR})
    if reason == "DeadlineExceeded":
        # What is to be stopped is the spending, whatever is kept of other failures.
        return everything | {names.TRAINER, names.MODEL}
    return everything if on_failure == "delete" else frozenset()


def _active_time_left(world: World) -> float | None:
    if world.active_deadline_s is None:
        return None
    return world.active_deadline_s - active_seconds(world.status, world.now)


def active_seconds(status: JobStatus, now: datetime.datetime) -> float:
    """Seconds the job has been active, suspended time left out."""
    since = parse_time(status.active_since)
    running = 0.0 if since is None else max(0.0, (now - since).total_seconds())
    return status.active_seconds + running


def parse_time(text: str) -> datetime.datetime | None:
    """An RFC 3339 time as the API writes it; ``None`` for anything else."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def format_time(time: datetime.datetime) -> str:
    """RFC 3339 in UTC, whole seconds."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
