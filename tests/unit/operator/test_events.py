"""What is worth an Event, and that an Event never harms."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from inflight_operator.events import MAX_MESSAGE, ORDINARY, EventWriter, news
from inflight_operator.kube import Kube, KubeError
from inflight_runtime.api.enums import Phase
from inflight_runtime.api.status import Condition, JobStatus

JOB = {
    "apiVersion": "inflight.dev/v1alpha1",
    "metadata": {"name": "a", "namespace": "team", "uid": "u", "resourceVersion": "3"},
}


def status(phase: Phase | None, ready: str = "", message: str = "") -> JobStatus:
    """A status; ``ready`` is the reason for which it is not."""
    conditions = [
        Condition(
            type="Ready",
            status="False" if ready else "True",
            reason=ready or "Running",
            message=message,
            last_transition_time="2026-01-01T00:00:00Z",
        )
    ]
    return JobStatus(phase=phase, conditions=conditions)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (JobStatus(), status("Pending", "Starting"), []),
        (status("Pending", "Starting"), status("Starting", "Starting"), [("Normal", "Starting")]),
        (status("Starting", "Starting"), status("Running"), [("Normal", "Running")]),
        (status("Running"), status("Running"), []),
        (JobStatus(), status("Pending", "QuotaExceeded", "used: 1"), [("Warning", "QuotaExceeded")]),
        (status("Pending", "QuotaExceeded", "used: 1"), status("Pending", "QuotaExceeded", "used: 2"), []),
        (status("Pending", "QuotaExceeded"), status("Pending", "NameTaken"), [("Warning", "NameTaken")]),
        (status("Running"), status("Running", "Crashing"), [("Warning", "Crashing")]),
        (status("Running", "Crashing"), status("Running"), []),
        (status("Running"), status("Failed", "TrainerFailed"), [("Warning", "TrainerFailed")]),
        (status("Running"), status("Suspending", "Suspending"), [("Normal", "Suspending")]),
    ],
)
def test_what_changes_is_told_once(old: JobStatus, new: JobStatus, told: list[tuple[str, str]]) -> None:
    assert [(kind, reason) for kind, reason, _ in news(old, new)] == told


@pytest.mark.parametrize("reason", sorted(ORDINARY))
def test_what_is_a_matter_of_course_is_not_told(reason: str) -> None:
    assert news(status("Running"), status("Running", reason)) == []


class Writes:
    """Takes Events, or refuses them."""

    def __init__(self, error: KubeError | None = None) -> None:
        self.made: list[dict[str, Any]] = []
        self.error = error

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.made.append(manifest)
        return manifest


def test_an_event_names_its_job_and_fits_the_api() -> None:
    writes = Writes()
    tell = EventWriter(cast(Kube, writes)).tell(JOB, status("Pending"), status("Pending", "Refused", "x" * 5_000))
    asyncio.run(tell)
    (event,) = writes.made
    assert event["involvedObject"] == {
        "apiVersion": "inflight.dev/v1alpha1",
        "kind": "RLTrainingJob",
        "name": "a",
        "namespace": "team",
        "uid": "u",
        "resourceVersion": "3",
    }
    assert (event["type"], event["reason"], event["reportingComponent"]) == ("Warning", "Refused", "inflight-operator")
    assert len(event["message"]) == MAX_MESSAGE and event["message"].endswith("...")


def test_an_event_that_cannot_be_written_is_no_error() -> None:
    writes = Writes(KubeError(403, "Forbidden", "namespace is being terminated"))
    asyncio.run(EventWriter(cast(Kube, writes)).tell(JOB, status("Starting"), status("Running")))
