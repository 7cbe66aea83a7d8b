"""Writes children to the API server, in order, and remembers what was refused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from inflight_operator import names
from inflight_operator.builders import WORKLOADS, Child, Manifest
from inflight_operator.children import Owner, Step, model_fetched, next_step, stop_step
from inflight_operator.kube import FIELD_MANAGER, Kube, KubeError
from inflight_operator.lifecycle import LOOK_AGAIN_S, Cause
from inflight_operator.ownership import as_applied
from inflight_operator.refusals import Refusal, refusal_of, stale
from inflight_operator.store import Store
from inflight_operator.tokens import Tokens

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0
AT_ONCE: Final = 4
"""Writes of one job under way at the same time; the order only matters among workloads."""

OnWrite = Callable[[str, str], None]
"""Told of each write: kind and verb."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of writing a job's children.

    Attributes:
        refusal: the first that was in the way, in the order of the children; ``None`` when all are as they should be.
        waits_for_model: whether roles are held back until the model has been fetched.
        again_s: seconds until it should be tried again.
    """

    refusal: Refusal | None = None
    waits_for_model: bool = False
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Refused:
    refusal: Refusal
    failures: int
    due: float
    body: Manifest | None


class Applier:
    """Brings children to what they should be.

    Args:
        kube: the API.
        store: what is known of the children; takes in the answers.
        tokens: keeps the Secrets.
        on_write: told of each write.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        tokens: Tokens,
        on_write: OnWrite = lambda kind, verb: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._store = store
        self._tokens = tokens
        self._on_write = on_write
        self._clock = clock
        self._refused: dict[tuple[str, str, str], _Refused] = {}
        """By job's uid, kind and name: what not to try again before its time, however many events come in."""
        self._settled: dict[tuple[str, str], tuple[str, str]] = {}
        """By child's uid and field: versions that an apply left as they are, though they seem to differ."""

    def forget(self, uid: str) -> None:
        """Drop what is remembered of a job's refusals."""
        self._refused = {address: kept for address, kept in self._refused.items() if address[0] != uid}

    async def run(
        self, key: str, children: Sequence[Child], owner: Owner, trainer_pods: Callable[[], Awaitable[int]]
    ) -> Applied:
        """See to it that all children are there.

        What all roles share is written at once, workloads one after another: whoever cannot have the first has no use
        for GPUs that the second would hold.

        Args:
            key: of the job.
            children: in their order.
            owner: the job.
            trainer_pods: counts the trainer pods that have not ended; asked only when a JobSet is to be made anew.
        """
        shared = [child for child in children if child.kind not in WORKLOADS]
        limit = asyncio.Semaphore(AT_ONCE)

        async def bounded(child: Child) -> Refusal | None:
            async with limit:
                return await self._ensure(key, child, owner, trainer_pods)

        for refusal in await asyncio.gather(*map(bounded, shared)):
            if refusal is not None:
                return self._held_up(owner.uid, refusal)
        held_back = False
        for child in children:
            if child.kind not in WORKLOADS:
                continue
            if child.waits_for_model and not self._model_is_there(key, children, owner):
                held_back = True
                continue
            refusal = await self._ensure(key, child, owner, trainer_pods)
            if refusal is not None:
                return self._held_up(owner.uid, refusal)
        return Applied(waits_for_model=held_back)

    async def stop(self, key: str, live: Manifest) -> None:
        """Leave a workload without pods.

        Raises:
            KubeError: the API server would not.
        """
        step = stop_step(live)
        if step.verb not in ("patch", "delete"):
            return
        try:
            await self._write(key, live["kind"], live, step)
        except KubeError as error:
            if not stale(error):
                raise
            await self._look(key, live)

    async def delete(self, key: str, live: Manifest) -> None:
        """Delete an object, unless that is under way.

        Raises:
            KubeError: the API server would not.
        """
        metadata = live["metadata"]
        if metadata.get("deletionTimestamp"):
            return
        try:
            await self._kube.delete(live["kind"], metadata["namespace"], metadata["name"], metadata["uid"])
        except KubeError as error:
            if not stale(error):
                raise
            await self._look(key, live)
        else:
            self._on_write(live["kind"], "delete")

    async def _ensure(
        self, key: str, child: Child, owner: Owner, trainer_pods: Callable[[], Awaitable[int]]
    ) -> Refusal | None:
        address = (owner.uid, child.kind, child.name)
        live = self._store.child(key, (child.kind, child.name))
        # Secrets are not watched: who keeps the tokens finds out by itself what is to do.
        step = Step("create") if child.kind == "Secret" else next_step(child, live, owner)
        kept = self._refused.get(address)
        looked_only = False
        try:
            if child.kind == "JobSet" and step.verb == "wait" and owner.trainer_pods is None:
                owner = replace(owner, trainer_pods=await trainer_pods())
                step = next_step(child, live, owner)
            if kept is not None and kept.due > self._clock() and kept.body == step.body:
                return kept.refusal
            if child.kind == "Secret":
                refusal = await self._tokens.ensure(child.manifest, owner.uid)
            else:
                refusal = await self._persist(key, child, live, step, owner)
                looked_only = step.verb in ("wait", "refuse")
        except KubeError as error:
            refusal = refusal_of(error, child.kind, child.name)
            known = kept is not None and kept.refusal == refusal
            level = logging.DEBUG if known else logging.WARNING
            logger.log(level, "%s %s: %s: %s", step.verb, child.kind, refusal.cause.reason, refusal.cause.message)
        if refusal is None or looked_only:
            # What was only looked at costs nothing to look at again.
            self._refused.pop(address, None)
            return refusal
        failures = 1 if kept is None else kept.failures + 1
        pause = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(failures - 1, 10))
        self._refused[address] = _Refused(refusal, failures, self._clock() + pause, step.body)
        return refusal

    async def _persist(self, key: str, child: Child, live: Manifest | None, step: Step, owner: Owner) -> Refusal | None:
        """Take a step; where the cluster has moved on since it was last seen, look and decide again."""
        for last in (False, False, True):
            try:
                return await self._take(key, child, live, step, owner)
            except KubeError as error:
                if last or not stale(error) or (error.missing and step.verb == "create"):
                    raise
            live = await self._look(key, child.manifest)
            step = next_step(child, live, owner)
        raise AssertionError("unreachable")

    async def _look(self, key: str, manifest: Manifest) -> Manifest | None:
        """An object as it is now."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = await self._kube.get(kind, manifest["metadata"]["namespace"], name)
        if found is None:
            known = self._store.child(key, (kind, name))
            if known is not None:
                self._store.remove(kind, known)
            return None
        found["kind"] = kind
        # What the watch does not show stays out of the store: nobody would tell when it goes.
        if (found["metadata"].get("labels") or {}).get(names.MANAGED_BY_LABEL) == names.MANAGED_BY:
            self._store.put(kind, found)
        return found

    async def _take(self, key: str, child: Child, live: Manifest | None, step: Step, owner: Owner) -> Refusal | None:
        if step.verb in ("wait", "refuse"):
            return step.refusal
        if step.verb == "leave":
            return None
        if step.verb == "create":
            assert step.body is not None
            try:
                self._took(key, child.kind, "create", await self._kube.create(step.body))
                return None
            except KubeError as error:
                if not error.exists:
                    raise
            found = await self._look(key, child.manifest)
            if found is None:
                return Refusal(Cause("WaitingForDeletion", f"{child.kind} {child.name} is just going"), passing=True)
            step = next_step(child, found, owner)
            if step.verb == "create":
                return None
            return await self._take(key, child, found, step, owner)
        assert live is not None
        await self._write(key, child.kind, live, step)
        if step.verb == "delete":
            return Refusal(Cause("WaitingForDeletion", f"{child.kind} {child.name} is made anew"), passing=True)
        return None

    async def _write(self, key: str, kind: str, live: Manifest, step: Step) -> None:
        metadata = live["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        logger.info("%s %s %s%s", step.verb, kind, name, f" ({step.note})" if step.note else "")
        if step.verb == "delete":
            await self._kube.delete(kind, namespace, name, uid)
            self._on_write(kind, "delete")
        elif step.verb == "patch":
            assert step.body is not None
            self._took(key, kind, "patch", await self._kube.patch(kind, namespace, name, step.body))
        elif step.verb == "apply":
            assert step.body is not None
            if self._settled.get((uid, step.note)) == _versions(live, step.body):
                return
            await self._own(kind, namespace, name)
            answer = await self._kube.apply(step.body, uid)
            self._took(key, kind, "apply", answer)
            if answer["metadata"].get("resourceVersion") == metadata.get("resourceVersion"):
                logger.warning("%s %s: the API server writes %s its own way; it is left so", kind, name, step.note)
                self._settled[uid, step.note] = _versions(live, step.body)

    async def _own(self, kind: str, namespace: str, name: str) -> None:
        """Let the apply that follows be able to take away what we once wrote."""
        found = await self._kube.get(kind, namespace, name)
        managed = None if found is None else as_applied(found["metadata"].get("managedFields") or [], FIELD_MANAGER)
        if found is not None and managed is not None:
            metadata = found["metadata"]
            guard = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
            await self._kube.patch(kind, namespace, name, {"metadata": {**guard, "managedFields": managed}})
            self._on_write(kind, "patch")

    def _took(self, key: str, kind: str, verb: str, answer: Manifest) -> None:
        self._store.put(kind, answer)
        self._on_write(kind, verb)

    def _held_up(self, uid: str, refusal: Refusal) -> Applied:
        due = [kept.due for address, kept in self._refused.items() if address[0] == uid and kept.refusal == refusal]
        if due:
            return Applied(refusal, again_s=max(0.05, min(due) - self._clock()))
        return Applied(refusal, again_s=LOOK_AGAIN_S if refusal.passing else None)

    def _model_is_there(self, key: str, children: Sequence[Child], owner: Owner) -> bool:
        job = next((child for child in children if child.kind == "Job"), None)
        live = None if job is None else self._store.child(key, ("Job", job.name))
        return live is not None and model_fetched(live, owner)


def _versions(live: Manifest, body: Manifest) -> tuple[str, str]:
    """What a drift was seen in: the spec of the live object as of its generation, and what was asked for."""
    metadata = live["metadata"]
    seen = metadata.get("generation") or metadata.get("resourceVersion")
    return str(seen), str(body["metadata"].get("annotations"))
