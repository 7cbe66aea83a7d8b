"""Looks at the pods and events of jobs that are not as they should be, less and less often while nothing changes.

Pods are not watched: a cluster has many. They are listed for one job, when its own children say that something is
amiss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.diagnosis import creation_cause, pod_causes, replica_failure
from inflight_operator.kube import Kube
from inflight_operator.lifecycle import Cause
from inflight_operator.observed import role_of
from inflight_runtime.api.status import RoleStatus

FIRST_LOOK_S: Final = 3.0
"""Pods that start take a moment: no news of that."""
FIRST_PAUSE_S: Final = 4.0
LAST_PAUSE_S: Final = 60.0

Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a job's trouble.

    Attributes:
        causes: by role.
        again_s: seconds until the next look is due; ``None`` when all is well.
    """

    causes: Mapping[str, Cause] = field(default_factory=dict)
    again_s: float | None = None


@dataclass(slots=True)
class _Memory:
    signature: Signature
    due: float
    pause: float = FIRST_PAUSE_S
    causes: Mapping[str, Cause] = field(default_factory=dict)


class Looks:
    """Remembers for each job when to look next.

    Args:
        kube: the API.
        clock: seconds, monotonic.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._jobs: dict[str, _Memory] = {}
        self._pauses: dict[str, tuple[str, float]] = {}

    def forget(self, key: str) -> None:
        """Drop what is remembered of a job."""
        self._jobs.pop(key, None)
        self._pauses.pop(key, None)

    def pause(self, key: str, reason: str) -> float:
        """Seconds to wait before a job that is held up for ``reason`` is tried again; grows while the reason stays."""
        before = self._pauses.get(key)
        pause = 1.0 if before is None or before[0] != reason else min(LAST_PAUSE_S, before[1] * 2)
        self._pauses[key] = (reason, pause)
        return pause

    async def causes(
        self,
        key: str,
        job: str,
        children: Sequence[Manifest],
        jobs: Sequence[Manifest],
        counts: Mapping[str, RoleStatus],
    ) -> Look:
        """Why roles are not all ready.

        Args:
            key: ``namespace/name`` of the job.
            job: its name.
            children: its own children.
            jobs: batch Jobs with its labels.
            counts: desired and ready pods of each role.

        Raises:
            KubeError: pods or events cannot be listed.
        """
        signature: Signature = tuple(
            sorted((role, count.desired, count.ready) for role, count in counts.items() if count.ready < count.desired)
        )
        if not signature:
            self._jobs.pop(key, None)
            return Look()
        memory, now = self._jobs.get(key), self._clock()
        roles = {role for role, _, _ in signature}
        if memory is None or memory.signature != signature:
            kept = {} if memory is None else {role: cause for role, cause in memory.causes.items() if role in roles}
            memory = self._jobs[key] = _Memory(signature, now + FIRST_LOOK_S, causes=kept)
        if now >= memory.due:
            memory.causes = await self._look(key, job, children, jobs, counts=counts, roles=roles)
            memory.due = now + memory.pause
            memory.pause = min(LAST_PAUSE_S, memory.pause * 2)
        return Look(memory.causes, max(0.1, memory.due - now))

    async def _look(
        self,
        key: str,
        job: str,
        children: Sequence[Manifest],
        jobs: Sequence[Manifest],
        *,
        counts: Mapping[str, RoleStatus],
        roles: set[str],
    ) -> dict[str, Cause]:
        namespace = key.partition("/")[0]
        pods = await self._kube.list("Pod", namespace, f"{names.JOB_LABEL}={job}")
        alive = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]
        causes = {role: cause for role, cause in pod_causes(pods).items() if role in roles}
        for role in sorted(roles):
            if sum(role_of(pod) == role for pod in alive) >= counts[role].desired:
                continue
            cause = await self._creation(namespace, role, children, jobs)
            if cause is not None:
                causes[role] = cause
        return causes

    async def _creation(
        self, namespace: str, role: str, children: Sequence[Manifest], jobs: Sequence[Manifest]
    ) -> Cause | None:
        """Why pods of a role are not there at all."""
        makers = [child for child in (*children, *jobs) if role_of(child) == role]
        for maker in makers:
            if maker["kind"] == "Deployment" and (cause := replica_failure(maker)) is not None:
                return cause
        for maker in makers:
            if maker["kind"] in ("StatefulSet", "Job", "JobSet"):
                uid = maker["metadata"]["uid"]
                events = await self._kube.list("Event", namespace, fields=f"involvedObject.uid={uid}")
                if (cause := creation_cause(events)) is not None:
                    return cause
        return None
