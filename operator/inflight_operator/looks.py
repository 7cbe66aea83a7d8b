"""Looks at the pods and events of jobs that are not as they should be, less and less often while nothing changes.

Pods are not watched: a cluster has many. They are listed for one job, when its own children say that something is
amiss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from inflight_operator import names
from inflight_operator.builders import Manifest, role_of
from inflight_operator.diagnosis import claim_cause, creation_cause, pod_causes, replica_failure
from inflight_operator.kube import Kube, KubeError
from inflight_operator.lifecycle import Cause
from inflight_operator.refusals import refusal_of
from inflight_runtime.api.status import RoleStatus

logger = logging.getLogger(__name__)

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
        self._pauses: dict[str, tuple[str, float, float]] = {}

    def forget(self, key: str) -> None:
        """Drop what is remembered of a job."""
        self._jobs.pop(key, None)
        self._pauses.pop(key, None)

    def pause(self, key: str, reason: str) -> float:
        """Seconds to wait before a job that is held up for ``reason`` is tried again; grows while the reason stays."""
        before, now = self._pauses.get(key), self._clock()
        # Twice the pause without a word of it: it was over meanwhile.
        goes_on = before is not None and before[0] == reason and now - before[2] <= 2 * before[1] + 1
        pause = min(LAST_PAUSE_S, before[1] * 2) if before is not None and goes_on else FIRST_PAUSE_S / 4
        self._pauses[key] = (reason, pause, now)
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
            try:
                memory.causes = await self._look(key, job, children, jobs, counts=counts, roles=roles)
            except KubeError as error:
                # The rest of the status must be told all the same.
                logger.warning("why roles are not ready cannot be seen: %s", error)
                if not error.passing:
                    memory.causes = dict.fromkeys(roles, refusal_of(error, "Pod", "of the job").cause)
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
        for role, cause in causes.items():
            if cause.reason == "Unschedulable" and "persistentvolumeclaim" in cause.message.lower():
                waiting = [pod for pod in alive if role_of(pod) == role]
                causes[role] = await self._pending_claim(namespace, waiting) or cause
        return causes

    async def _pending_claim(self, namespace: str, pods: Sequence[Manifest]) -> Cause | None:
        """Why a claim that pods wait for has no volume."""
        volumes = [volume for pod in pods for volume in pod["spec"].get("volumes") or []]
        claims = {str(source["claimName"]) for volume in volumes if (source := volume.get("persistentVolumeClaim"))}
        for name in sorted(claims):
            claim = await self._kube.get("PersistentVolumeClaim", namespace, name)
            if claim is None or (claim.get("status") or {}).get("phase") != "Pending":
                continue
            if (cause := claim_cause(name, await self._events(namespace, claim))) is not None:
                return cause
        return None

    async def _creation(
        self, namespace: str, role: str, children: Sequence[Manifest], jobs: Sequence[Manifest]
    ) -> Cause | None:
        """Why pods of a role are not there at all."""
        makers = [child for child in (*children, *jobs) if role_of(child) == role]
        for maker in makers:
            if maker["kind"] == "Deployment" and (cause := replica_failure(maker)) is not None:
                return cause
        for maker in makers:
            if maker["kind"] not in ("StatefulSet", "Job", "JobSet"):
                continue
            if (cause := creation_cause(await self._events(namespace, maker))) is not None:
                return cause
        return None

    async def _events(self, namespace: str, subject: Manifest) -> list[Manifest]:
        uid = subject["metadata"]["uid"]
        return await self._kube.list("Event", namespace, fields=f"involvedObject.uid={uid}")
