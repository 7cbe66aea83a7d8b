"""Watches all along: what was there only for a moment is seen as well."""

from __future__ import annotations

import abc
import contextlib
import threading
from types import TracebackType
from typing import Any, Self

from kubernetes import client, watch

from inflight_operator.crd import GROUP, PLURAL, UNSEEN, VERSION


class Watching(abc.ABC):
    """Sees every state of some objects, from entering to leaving.

    Args:
        read: lists the objects, or watches them.
        where: its arguments.
    """

    def __init__(self, read: Any, **where: str) -> None:
        self._read = read
        self._where = where
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._version = ""

    def __enter__(self) -> Self:
        listed = client.ApiClient().sanitize_for_serialization(self._read(**self._where))
        for one in listed["items"]:
            self.take("ADDED", one)
        self._version = listed["metadata"]["resourceVersion"]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(5)

    @abc.abstractmethod
    def take(self, event: str, one: dict[str, Any]) -> None:
        """Take in an object as it is now."""

    def _run(self) -> None:
        while not self._ended.is_set():
            options = {"resource_version": self._version, "timeout_seconds": 1}
            with contextlib.suppress(TimeoutError):
                events: Any = watch.Watch()
                for event in events.stream(self._read, **self._where, **options):
                    self.take(event["type"], event["raw_object"])
                    self._version = event["raw_object"]["metadata"]["resourceVersion"]


class PodWatch(Watching):
    """Counts the pods with these labels.

    Args:
        admin: who may see them.
        namespace: where they are.
        selector: their labels.

    Attributes:
        most: most pods that had not ended at one moment.
        seen: names of all pods so far.
    """

    def __init__(self, admin: client.ApiClient, namespace: str, selector: str) -> None:
        super().__init__(client.CoreV1Api(admin).list_namespaced_pod, namespace=namespace, label_selector=selector)
        self.most = 0
        self.seen: set[str] = set()
        self._alive: set[str] = set()

    def take(self, event: str, one: dict[str, Any]) -> None:
        """Take in a pod."""
        metadata = one["metadata"]
        self.seen.add(metadata["name"])
        if event == "DELETED" or one["status"].get("phase") in ("Succeeded", "Failed"):
            self._alive.discard(metadata["uid"])
        else:
            self._alive.add(metadata["uid"])
        self.most = max(self.most, len(self._alive))


KSTATUS = ("Ready", "Reconciling", "Stalled")
READY = {"Ready": "True"}
BUSY = {"Ready": "False", "Reconciling": "True"}
STALLED = {"Ready": "False", "Stalled": "True"}
TABLE: dict[str, tuple[dict[str, str], ...]] = {
    "Pending": (BUSY, STALLED),
    "Starting": (BUSY,),
    "Running": (READY, BUSY),
    "Suspending": (BUSY,),
    "Suspended": (READY,),
    "Completing": (BUSY,),
    "Succeeded": (READY,),
    "Failed": (STALLED,),
}
"""What GitOps tools may see of each phase."""
ACTIVE = {"Suspending", "Completing", "Failed"}
NEXT = {
    "": {"Pending", "Starting", "Suspended", "Failed"},
    "Pending": {"Starting", "Running", *ACTIVE},
    "Starting": {"Pending", "Running", *ACTIVE},
    "Running": ACTIVE,
    "Suspending": {"Suspended", "Pending", "Completing", "Failed"},
    "Suspended": {"Pending", "Completing", "Failed"},
    "Completing": {"Succeeded"},
    "Succeeded": set(),
    "Failed": set(),
}
"""What may come after each phase."""


class JobWatch(Watching):
    """Checks every status that a job ever has.

    Args:
        admin: who may see the jobs.
        namespace: where they are.

    Attributes:
        wrong: what was against the rules.
        phases: of each job by name, one after another.
    """

    def __init__(self, admin: client.ApiClient, namespace: str) -> None:
        read = client.CustomObjectsApi(admin).list_namespaced_custom_object
        super().__init__(read, group=GROUP, version=VERSION, namespace=namespace, plural=PLURAL)
        self.wrong: list[str] = []
        self.phases: dict[str, list[str]] = {}
        self._last: dict[str, str] = {}
        self._told: dict[str, list[dict[str, str]]] = {}

    def take(self, event: str, one: dict[str, Any]) -> None:
        """Take in a job."""
        metadata, status = one["metadata"], one["status"]
        if event == "DELETED" or status == UNSEEN:
            return
        phase, before = str(status.get("phase", "")), self._last.get(metadata["uid"], "")
        name = metadata["name"]
        if phase != before:
            self._last[metadata["uid"]] = phase
            self.phases.setdefault(name, []).append(phase)
            if phase not in NEXT[before]:
                self.wrong.append(f"{name}: {phase} came after {before or 'nothing'}")
        if status.get("observedGeneration", 0) > metadata["generation"]:
            self.wrong.append(f"{name}: a generation was observed before it was there")
        conditions = status.get("conditions") or []
        # A start, a suspend and an end are written down before anything is done, and with the conditions of before.
        moving = conditions == self._told.get(metadata["uid"], []) and phase != before
        self._told[metadata["uid"]] = conditions
        told = {one["type"]: one["status"] for one in conditions if one["type"] in KSTATUS}
        if not moving and told not in TABLE[phase]:
            self.wrong.append(f"{name}: {phase} with {told}")
