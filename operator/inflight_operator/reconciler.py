"""Brings one job to what its spec wants: observe, plan, apply, status. Everything here may be cut off at any point.

Every decision rests on the job's spec and status and on its children, never on what this process remembers; what is
remembered only spares calls.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from inflight_operator import names
from inflight_operator.apply import Applied, Applier
from inflight_operator.builders import (
    BUILDER_REVISION,
    COORDINATOR_PORT,
    INFERENCE_PORT,
    WORKLOADS,
    Build,
    Child,
    EnvironmentCode,
    Facts,
    Manifest,
    build_children,
    requested_gpus,
    resolved_images,
    role_of,
)
from inflight_operator.children import Owner, belongs_to, start_of
from inflight_operator.diagnosis import failed_pod, pods_left
from inflight_operator.events import EventWriter
from inflight_operator.kube import KINDS, Kube, KubeError
from inflight_operator.lifecycle import Cause, Plan, World, plan, pods_matter
from inflight_operator.looks import Looks
from inflight_operator.merge import MergeError
from inflight_operator.observed import counts_of, grace_of, restarts_of, settled_of, trainer_of
from inflight_operator.progress import ProgressReader
from inflight_operator.refusals import Refusal, refusal_of, shortened
from inflight_operator.settings import Settings
from inflight_operator.status import Found, begun, left, merge_patch, new_status, troubled, wire
from inflight_operator.store import Store
from inflight_operator.subject import Subject, job_of, of_this_start, replicas_of, status_of
from inflight_operator.tokens import Tokens
from inflight_runtime.api import KIND, JobError
from inflight_runtime.api.status import Endpoints, JobStatus

logger = logging.getLogger(__name__)

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
KEPT_FOR_GOOD: Final = frozenset({"PersistentVolumeClaim"})
"""What the TTL leaves: data goes only with the job, or never."""
CHECK_EVERY_S: Final = 300.0
"""Running jobs are looked at this often without any event: Secrets are not watched."""


class Reconciler:
    """The operator's one work function, and what it works with.

    Args:
        kube: the API.
        store: jobs and children as they were last seen.
        settings: the operator's.
        applier: writes children.
        tokens: keeps the token Secrets.
        progress: reads the coordinators.
        events: writes Events.
        now: the time.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        settings: Settings,
        *,
        applier: Applier,
        tokens: Tokens,
        progress: ProgressReader,
        events: EventWriter,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._kube = kube
        self._store = store
        self._settings = settings
        self._applier = applier
        self._tokens = tokens
        self._progress = progress
        self._events = events
        self._now = now
        self._looks = Looks(kube, time.monotonic)
        self._uids: dict[str, str] = {}

    async def reconcile(self, key: str) -> float | None:
        """Do all there is to do for a job now.

        Args:
            key: ``namespace/name``.

        Returns:
            Seconds after which something may be to do without any event; ``None`` for never.

        Raises:
            KubeError: the API server would not or could not; to be tried again.
        """
        raw = self._store.job(key)
        uid = "" if raw is None else str(raw["metadata"]["uid"])
        if self._uids.get(key) not in (None, uid):
            self._forget(key)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._progress.forget(key)
            return None
        self._uids[key] = uid
        status = status_of(raw)
        try:
            job = job_of(raw)
        except JobError as error:
            return await self._refuse(key, raw, status, Cause("InvalidSpec", shortened(str(error))))
        subject = Subject(key, raw, job, status, status, self._store.children(key))
        if QUEUE_LABEL in (raw["metadata"].get("labels") or {}) and not status.starts:
            message = f"label {QUEUE_LABEL}: queues are not supported yet; remove the label"
            return await self._refuse(key, raw, status, Cause("QueueNotSupported", message))
        try:
            again = await self._work(subject)
        except KubeError as error:
            if error.missing and error.message.startswith(KINDS[KIND].plural):
                return None  # deleted meanwhile: the event is under way
            if not error.passing and not error.missing:
                await self._tell_trouble(key, refusal_of(error, KIND, key.partition("/")[2]).cause)
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"the operator cannot handle this job: {type(error).__name__}: {error}; please report it"
            await self._tell_trouble(key, Cause("InternalError", shortened(message)))
            raise
        # An answer to our own write may have held a newer spec; then its event, later, is no news.
        newest = self._store.job(key)
        moved = newest is not None and newest["metadata"].get("generation") != raw["metadata"].get("generation")
        return 0.0 if moved else again

    async def _tell_trouble(self, key: str, cause: Cause) -> None:
        """Tell what the work cannot get past, for instance a missing right to stop what should be suspended."""
        raw = self._store.job(key)
        if raw is None:
            return
        metadata, status = raw["metadata"], status_of(raw)
        new = troubled(status, cause, metadata.get("generation", 0), self._now())
        try:
            raw = await self._patch_status(raw, new)
        except KubeError as second:
            logger.warning("the status cannot be written: %s", second)
            return
        await self._events.tell(raw, status, new)

    def _forget(self, key: str) -> None:
        uid = self._uids.pop(key, "")
        namespace, _, name = key.partition("/")
        self._applier.forget(uid)
        self._tokens.forget(namespace, name)
        self._progress.forget(key)
        self._looks.forget(key)

    async def _work(self, subject: Subject) -> float | None:
        now = self._now()
        trainer = trainer_of(subject.owned, subject.status)
        pods: list[Manifest] | None = None
        if pods_matter(subject.status, subject.job.spec.suspend, trainer):
            pods = await self._pods(subject)
        lifecycle = subject.job.spec.lifecycle
        planned = plan(
            World(
                now=now,
                suspend=subject.job.spec.suspend,
                status=subject.status,
                trainer=trainer,
                pods=None if pods is None else pods_left(pods),
                settled=settled_of(subject.owned, subject.batch_jobs),
                grace_s=grace_of(subject.owned),
                active_deadline_s=lifecycle.active_deadline_seconds,
                ttl_s=lifecycle.ttl_seconds_after_finished,
                on_failure=lifecycle.on_failure,
            )
        )
        found = Found(planned, subject.raw["metadata"].get("generation", 0))
        if planned.run:
            return await self._run(subject, found)
        return await self._wind_down(subject, found, pods)

    async def _run(self, subject: Subject, found: Found) -> float | None:
        """See to it that all children are there, and tell how they are."""
        code = await self._code(subject, begin=found.plan.begin)
        if isinstance(code, Refusal):
            return await self._held_up(subject, found, code)
        try:
            if found.plan.begin:
                subject = await self._begin(subject, code)
            children = self._build(subject, code)
        except MergeError as error:
            cause = Cause("InvalidPodTemplate", f"spec.<role>.{error}; suspend the job and mend it")
            return await self._held_up(subject, found, Refusal(cause, stalled=True))
        start = subject.status.starts
        owner = Owner(subject.job.name, subject.uid, start, subject.job.spec.checkpoint.resume_from)

        async def trainer_pods() -> int:
            return await self._trainer_pods(subject)

        children = of_this_start(children, subject)
        applied = await self._applier.run(subject.key, children, owner, trainer_pods)
        subject = replace(subject, children=self._store.children(subject.key))
        if applied.refusal is None and not applied.waits_for_model:
            await self._sweep(subject, children)
        return await self._tell(subject, found, children, applied)

    async def _trainer_pods(self, subject: Subject) -> int:
        """Trainer pods that have not ended, or may still come."""
        subject = replace(subject, children=self._store.children(subject.key))
        job_sets = [child for child in subject.owned if child["kind"] == "JobSet"]
        orphans = [
            one
            for one in subject.batch_jobs
            if role_of(one) == names.TRAINER
            and not any(belongs_to(one, job_set["metadata"]["uid"]) for job_set in job_sets)
        ]
        coming = names.TRAINER not in settled_of(subject.owned, subject.batch_jobs) or bool(orphans)
        return pods_left(await self._pods(subject)).get(names.TRAINER, 0) or int(coming)

    async def _begin(self, subject: Subject, code: EnvironmentCode) -> Subject:
        """Freeze what the run is rendered from, before any child is written for it."""
        facts = self._facts(subject, code)
        build = Build(subject.job, self._settings, facts)
        frozen = {
            "images": resolved_images(build_children(subject.job, self._settings, facts)),
            "builder_revision": BUILDER_REVISION,
            "servers_at_start": build.servers,
            "actors_at_start": build.actors,
        }
        return await self._write_status(subject, begun(subject.status, self._now(), frozen))

    def _facts(self, subject: Subject, code: EnvironmentCode, *, frozen: bool = False) -> Facts:
        """What the builders must know; of a start that has begun as it was then."""
        status = subject.status
        facts = Facts(
            namespace=subject.namespace,
            uid=subject.uid,
            token="",  # nothing else depends on it, and who makes the Secret puts it in
            code=code,
            inference_replicas=_first(status.inference.replicas_before_suspend, 1),
            actor_replicas=_first(status.actors.replicas_before_suspend, 1),
        )
        if not frozen:
            return facts
        return replace(
            facts,
            images=dict(status.images),
            servers_at_start=status.inference.replicas_at_start,
            actors_at_start=status.actors.replicas_at_start,
        )

    def _build(self, subject: Subject, code: EnvironmentCode) -> list[Child]:
        return build_children(subject.job, self._settings, self._facts(subject, code, frozen=True))

    async def _code(self, subject: Subject, *, begin: bool) -> EnvironmentCode | Refusal:
        """The environment's files: the job's own copy, or at a start the user's ConfigMap."""
        source = subject.job.spec.environment.config_map
        if source is None:
            return EnvironmentCode()
        if not begin:
            start = str(subject.status.starts)
            for child in subject.owned:
                if child["kind"] == "ConfigMap" and role_of(child) == names.CODE and start_of(child) == start:
                    return EnvironmentCode(child.get("data") or {}, child.get("binaryData") or {})
        try:
            found = await self._kube.get("ConfigMap", subject.namespace, source)
        except KubeError as error:
            return refusal_of(error, "ConfigMap", source)
        if found is None:
            message = f"spec.environment.configMap: there is no ConfigMap {source} in namespace {subject.namespace}"
            return Refusal(Cause("ConfigMapNotFound", message))
        return EnvironmentCode(found.get("data") or {}, found.get("binaryData") or {})

    async def _sweep(self, subject: Subject, children: Sequence[Child]) -> None:
        """Delete ConfigMaps of earlier starts: their names hold a digest, so nothing replaces them."""
        wanted = {child.name for child in children if child.kind == "ConfigMap"}
        for child in subject.owned:
            stale = start_of(child) != str(subject.status.starts)
            if child["kind"] == "ConfigMap" and stale and child["metadata"]["name"] not in wanted:
                await self._applier.delete(subject.key, child)

    async def _wind_down(self, subject: Subject, found: Found, pods: list[Manifest] | None) -> float | None:
        """Suspend, finish, clean up."""
        planned = found.plan
        if planned.phase == "Failed" and subject.status.phase != "Failed":
            # All in one write: whoever goes on from here must know the reason, it decides what is removed.
            found = replace(found, failure=await self._why(subject, planned, pods))
            subject = replace(subject, status=left(subject.status, planned, self._now(), {}))
            self._progress_while(subject, planned)
            await self._tell(subject, found, None, Applied())
            return 0.0
        if planned.leave:
            replicas = {role: replicas_of(subject.owned, role) for role in (names.INFERENCE, names.ACTOR)}
            subject = await self._write_status(subject, left(subject.status, planned, self._now(), replicas))
        self._progress_while(subject, planned)
        for child in subject.owned:
            role = role_of(child)
            if child["kind"] not in WORKLOADS:
                continue
            if role in planned.removed and role != names.COORDINATOR:
                await self._applier.delete(subject.key, child)
            elif role in planned.stopped:
                await self._applier.stop(subject.key, child)
        if names.COORDINATOR in planned.removed:
            found = await self._last_words(subject, found)
        if planned.clean:
            await self._clean(subject)
        subject = replace(subject, children=self._store.children(subject.key))
        return await self._tell(subject, found, None, Applied())

    def _progress_while(self, subject: Subject, planned: Plan) -> None:
        if planned.phase in ("Suspended", "Succeeded", "Failed"):
            self._progress.forget(subject.key)

    async def _last_words(self, subject: Subject, found: Found) -> Found:
        """Read the final numbers of a run, then let its coordinator go."""
        coordinator = subject.children.get(("StatefulSet", names.coordinator(subject.job.name)))
        if coordinator is None or not belongs_to(coordinator, subject.uid):
            return replace(found, reading=self._progress.latest(subject.key))
        if coordinator["metadata"].get("deletionTimestamp"):
            return replace(found, reading=self._progress.latest(subject.key))
        reading = await self._progress.read_now(subject.key, self._coordinator_url(subject))
        await self._applier.delete(subject.key, coordinator)
        return replace(found, reading=reading)

    async def _clean(self, subject: Subject) -> None:
        """Delete everything but claims."""
        found = [child for child in subject.owned if child["kind"] not in KEPT_FOR_GOOD]
        for child in found:
            await self._applier.delete(subject.key, child)
        if found:
            # With the first of the others: whether it has gone cannot be watched.
            await self._tokens.delete(subject.namespace, subject.job.name, subject.uid)

    async def _why(self, subject: Subject, planned: Plan, pods: list[Manifest] | None) -> Cause | None:
        """Why the run failed, in the words of whoever knows best."""
        cause = planned.failure
        if cause is None or cause.reason != "TrainerFailed":
            return cause
        told = failed_pod(await self._pods(subject) if pods is None else pods, names.TRAINER)
        reading = await self._progress.read_now(subject.key, self._coordinator_url(subject))
        said = f"the run was given up: {reading.reason}" if reading.outcome == "failed" and reading.reason else ""
        parts = [part for part in (told, said, cause.message) if part]
        return Cause(cause.reason, shortened("; ".join(parts)))

    async def _tell(
        self, subject: Subject, found: Found, children: Sequence[Child] | None, applied: Applied
    ) -> float | None:
        """Write the status when it says something new."""
        live = [child for child in subject.owned if not child["metadata"].get("deletionTimestamp")]
        counts = counts_of(live, subject.batch_jobs, subject.job)
        found = replace(
            found,
            counts=counts,
            problem=applied.refusal,
            waits_for_model=applied.waits_for_model,
            restarts=restarts_of(live, subject.status),
            gpus=subject.status.gpus if children is None else requested_gpus(children),
            trainer=trainer_of(live, subject.status),
        )
        if found.plan.phase in ("Suspended", "Succeeded", "Failed"):
            found = replace(found, gpus=0)
        again = [found.plan.again_s, applied.again_s]
        if found.plan.run:
            found = replace(found, endpoints=self._endpoints(subject, applied))
            self._follow(subject, counts.get(names.COORDINATOR))
            found = replace(found, reading=self._progress.latest(subject.key))
            look = await self._looks.causes(subject.key, subject.job.name, live, subject.batch_jobs, counts)
            found = replace(found, causes=look.causes)
            again += [look.again_s, CHECK_EVERY_S]
        subject = await self._write_status(subject, new_status(subject.job.name, subject.status, found, self._now()))
        await self._events.tell(subject.raw, subject.before, subject.status)
        return min((delay for delay in again if delay is not None), default=None)

    def _follow(self, subject: Subject, coordinator: Any) -> None:
        if coordinator is not None and coordinator.ready:
            self._progress.follow(subject.key, self._coordinator_url(subject))
        else:
            self._progress.forget(subject.key)

    def _coordinator_url(self, subject: Subject) -> str:
        return self._settings.coordinator_address(subject.job.name, subject.namespace, COORDINATOR_PORT)

    def _endpoints(self, subject: Subject, applied: Applied) -> Endpoints:
        if applied.refusal is not None:
            return subject.status.endpoints
        name, namespace = subject.job.name, subject.namespace
        return Endpoints(
            coordinator=f"http://{names.coordinator(name)}.{namespace}.svc:{COORDINATOR_PORT}",
            inference=f"http://{names.inference(name)}.{namespace}.svc:{INFERENCE_PORT}/v1",
        )

    async def _held_up(self, subject: Subject, found: Found, refusal: Refusal) -> float | None:
        """Tell why nothing can be built; tried again later, as its cure may come without an event."""
        wait = None if refusal.stalled else self._looks.pause(subject.key, refusal.cause.reason)
        return await self._tell(subject, found, None, Applied(refusal, again_s=wait))

    async def _refuse(self, key: str, raw: Manifest, status: JobStatus, cause: Cause) -> float | None:
        """Tell that a spec cannot be run. A job that has run is left as it is."""
        phase = status.phase or "Pending"
        found = Found(Plan(phase), raw["metadata"].get("generation", 0), invalid=cause)
        name = raw["metadata"]["name"]
        new = new_status(name, status, found, self._now())
        if status.starts:
            new = status.model_copy(
                update={"conditions": new.conditions, "observed_generation": new.observed_generation}
            )
        written = await self._patch_status(raw, new)
        await self._events.tell(written, status, new)
        return None

    async def _pods(self, subject: Subject) -> list[Manifest]:
        selector = f"{names.JOB_LABEL}={subject.job.name}"
        return await self._kube.list("Pod", subject.namespace, selector)

    async def _write_status(self, subject: Subject, new: JobStatus) -> Subject:
        raw = await self._patch_status(subject.raw, new)
        return replace(subject, raw=raw, status=new)

    async def _patch_status(self, raw: Manifest, new: JobStatus) -> Manifest:
        patch = merge_patch(raw.get("status") or {}, wire(new))
        if not patch:
            return raw
        metadata = raw["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": patch}
        written = await self._kube.patch(KIND, metadata["namespace"], metadata["name"], body, "status")
        self._store.put(KIND, written)
        return written


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
