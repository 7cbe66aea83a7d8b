"""One job as a reconcile sees it: the object, its status and its children at one moment. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from inflight_operator.builders import Child, Manifest, role_of
from inflight_operator.children import belongs_to, start_of
from inflight_operator.store import Address
from inflight_runtime.api import API_VERSION, KIND, RLTrainingJob, validate_job
from inflight_runtime.api.status import JobStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subject:
    """One job, as it was observed.

    Attributes:
        key: ``namespace/name``.
        raw: the object.
        job: its spec, checked.
        status: its status.
        before: its status when the reconcile began.
        children: its children and the trainer's Jobs.
    """

    key: str
    raw: Manifest
    job: RLTrainingJob
    status: JobStatus
    before: JobStatus
    children: dict[Address, Manifest]

    @property
    def uid(self) -> str:
        """Of the job."""
        return str(self.raw["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        """Of the job."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def owned(self) -> list[Manifest]:
        """Children that are this job's."""
        return [child for child in self.children.values() if belongs_to(child, self.uid)]

    @property
    def batch_jobs(self) -> list[Manifest]:
        """Batch Jobs with the job's labels, the trainer's among them."""
        return [child for address, child in self.children.items() if address[0] == "Job"]


def status_of(raw: Manifest) -> JobStatus:
    """Status of a job as it stands in the object."""
    try:
        return JobStatus.model_validate(raw.get("status") or {}, by_alias=True, by_name=False)
    except ValidationError:
        # The schema lets nothing like that be written; were it so, the phase alone decides what is safe.
        logger.exception("the status cannot be read, and is written anew")
        return JobStatus()


def job_of(raw: Manifest) -> RLTrainingJob:
    """The job as a checked model.

    Raises:
        JobError: it cannot be run.
    """
    metadata = {name: raw["metadata"][name] for name in ("name", "namespace") if name in raw["metadata"]}
    return validate_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": raw.get("spec")}, "")


def of_this_start(children: Sequence[Child], subject: Subject) -> list[Child]:
    """The children without ConfigMaps that only newer builders would make: the pods name those of their start."""
    start = str(subject.status.starts)
    there = {
        (child["kind"], role_of(child)): child["metadata"]["name"]
        for child in subject.owned
        if child["kind"] == "ConfigMap" and start_of(child) == start
    }
    return [child for child in children if there.get((child.kind, child.role), child.name) == child.name]


def replicas_of(children: Sequence[Manifest], role: str) -> int | None:
    """Replicas of a role's workload, to come back to them; ``None`` when there is none or it has been stopped."""
    for child in children:
        if child["kind"] in ("StatefulSet", "Deployment") and role_of(child) == role:
            return child["spec"].get("replicas") or None
    return None
