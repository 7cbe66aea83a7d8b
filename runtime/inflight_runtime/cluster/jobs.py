"""Jobs as the API server has them, and what is said when there is no such job."""

from __future__ import annotations

import contextlib
import datetime
import difflib
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from inflight_runtime.api.status import Condition, JobStatus
from inflight_runtime.cluster.connection import JOBS, ClusterError, Connection, Object, RefusedError

OVER: Final = ("Succeeded", "Failed")
ROLES: Final = ("coordinator", "inference", "actor", "trainer")
NAMES_SHOWN: Final = 10
WANTED_TRUE: Final = (
    "Validated",
    "ResourcesCreated",
    "CoordinatorReachable",
    "InferenceReady",
    "ActorsReady",
    "TrainerRunning",
    "Ready",
)
EXPECTED_REASONS: Final = ("Suspended", "Finished", "NotCreated")
"""Of a condition that is false because the phase is what it is."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job at one moment.

    Attributes:
        name: its name.
        namespace: where it is.
        uid: tells it from a later one of the same name.
        created: when it was made; ``None`` when the time cannot be read.
        wanted_steps: optimizer steps of its spec.
        suspend: whether it is asked to stand still.
        status: what the operator says of it.
    """

    name: str
    namespace: str
    uid: str
    created: datetime.datetime | None
    wanted_steps: int
    suspend: bool
    status: JobStatus

    @property
    def phase(self) -> str:
        """The phase in a word; ``not seen yet`` when no operator has looked at the job."""
        return self.status.phase or "not seen yet"

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.status.phase in OVER

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.status.progress.step if self.status.progress else 0

    @property
    def steps(self) -> int:
        """Optimizer steps wanted."""
        return (self.status.progress.steps if self.status.progress else 0) or self.wanted_steps

    def active_s(self, now: datetime.datetime) -> float:
        """Seconds it has been at work, suspended time left out."""
        since, until = parse_time(self.status.active_since), parse_time(self.status.completion_time) or now
        return self.status.active_seconds + (max(0.0, (until - since).total_seconds()) if since else 0.0)

    def condition(self, kind: str) -> Condition | None:
        """Its condition of a type."""
        return next((one for one in self.status.conditions if one.type == kind), None)

    @property
    def troubles(self) -> list[Condition]:
        """The conditions that are not as they should be, each cause once."""
        found: list[Condition] = []
        for one in self.status.conditions:
            bad = one.status != "True" and one.type in WANTED_TRUE and one.reason not in EXPECTED_REASONS
            if one.type == "Ready" and one.reason in (self.status.phase, *(other.reason for other in found)):
                continue  # it says no more than the phase, or than the condition that it sums up
            if bad or (one.type == "Failed" and one.status == "True"):
                found.append(one)
        if any(one.type == "Failed" for one in found):
            found = [one for one in found if one.type != "Ready"]
        return found

    @property
    def hopeless(self) -> bool:
        """Whether no waiting helps."""
        stalled = self.condition("Stalled")
        return stalled is not None and stalled.status == "True" and not self.over


def read_job(raw: Object) -> Job:
    """Take a job in.

    Raises:
        ClusterError: its status was written by a version that this one does not understand.
    """
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    try:
        status = JobStatus.model_validate(raw.get("status") or {})
    except ValidationError as error:
        raise ClusterError(
            f"the status of {metadata['name']} was written by another version of Inflight: {error}"
        ) from error
    return Job(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        created=parse_time(metadata.get("creationTimestamp", "")),
        wanted_steps=int((spec.get("algorithm") or {}).get("steps") or 0),
        suspend=bool(spec.get("suspend")),
        status=status,
    )


async def find_job(connection: Connection, name: str) -> Job:
    """Read one job.

    Raises:
        ClusterError: there is none of that name (the message has similar ones), or it cannot be read.
    """
    try:
        return read_job(await connection.get(JOBS, name))
    except RefusedError as error:
        # What is not known at all is told by another 404, in words that fit.
        if error.status != 404 or "not found" not in error.words or error.words.startswith("404"):
            raise
        raise await missing(connection, name) from error


async def missing(connection: Connection, name: str) -> ClusterError:
    """What to say when there is no job of a name."""
    names: list[str] = []
    with contextlib.suppress(RefusedError):  # without the right to list, the names stay unknown
        objects, _ = await connection.list(JOBS, {})
        names = sorted(one["metadata"]["name"] for one in objects)
    near = difflib.get_close_matches(name, names, n=3)
    hint = "give another namespace by -n" if not names else f"there are {_listed(names)}"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    return ClusterError(f"there is no job {name} in {connection.place} of context {connection.context}; {hint}")


def parse_time(text: str) -> datetime.datetime | None:
    """An RFC 3339 time as the API writes it; ``None`` for anything else."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
