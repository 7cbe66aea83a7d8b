"""Kubernetes Events of a job: one when its phase changes, one when something new is in its way."""

from __future__ import annotations

import datetime
import logging
import os
import uuid
from typing import Final, Literal

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.kube import Kube, KubeError
from inflight_operator.lifecycle import format_time
from inflight_operator.refusals import shortened
from inflight_operator.status import condition
from inflight_runtime.api import KIND
from inflight_runtime.api.status import JobStatus

logger = logging.getLogger(__name__)

MAX_MESSAGE: Final = 1_000
"""The API takes 1,024 characters."""
ORDINARY: Final = frozenset(
    {
        "Starting",
        "Suspending",
        "Completing",
        "FetchingModel",
        "NotReady",
        "WaitingForDeletion",
        "Conflict",
        "APIServerUnavailable",
        "NamespaceTerminating",
    }
)
"""Reasons for not being ready that are a matter of course, or of a moment, or that no Event can be written of."""
TOLD: Final = {
    "Starting": "all resources are created",
    "Running": "all roles are at work",
    "Suspending": "the run is being suspended",
    "Suspended": "no pod is left",
    "Completing": "the trainer has done all steps",
    "Succeeded": "the run has succeeded",
}

News = tuple[Literal["Normal", "Warning"], str, str]
"""Type, reason and message."""


def news(old: JobStatus, new: JobStatus) -> list[News]:
    """What is worth an Event between two statuses. Pure."""
    found: list[News] = []
    if new.phase != old.phase and new.phase in TOLD:
        found.append(("Normal", new.phase, TOLD[new.phase]))
    before, now = condition(old, "Ready"), condition(new, "Ready")
    told = before is not None and now is not None and (before.status, before.reason) == (now.status, now.reason)
    if now is not None and now.status == "False" and now.reason not in ORDINARY and not told:
        found.append(("Warning", now.reason, now.message))
    return found


class EventWriter:
    """Writes Events; one that cannot be written is only logged.

    Args:
        kube: the API.
    """

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._instance = os.environ.get("HOSTNAME", "") or names.MANAGED_BY

    async def tell(self, job: Manifest, old: JobStatus, new: JobStatus) -> None:
        """Write what is new between two statuses of a job."""
        for kind, reason, message in news(old, new):
            try:
                await self._kube.create(self._event(job, kind, reason, message))
            except KubeError as error:
                logger.warning("event %s was not written: %s", reason, error)

    def _event(self, job: Manifest, kind: str, reason: str, message: str) -> Manifest:
        metadata = job["metadata"]
        now = format_time(datetime.datetime.now(datetime.UTC))
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": job.get("apiVersion"),
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion"),
            },
            "type": kind,
            "reason": reason,
            "message": shortened(message, MAX_MESSAGE),
            "source": {"component": names.MANAGED_BY},
            "reportingComponent": names.MANAGED_BY,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
