"""The custom resource itself."""

from __future__ import annotations

import re
from typing import Any, Final, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from .base import ApiModel, refusal
from .errors import contradiction
from .placement import (
    ActorsSpec,
    CheckpointSpec,
    CoordinatorSpec,
    InferenceSpec,
    LifecycleSpec,
    LoggingSpec,
    SchedulingSpec,
    TrainerSpec,
    WeightSyncSpec,
)
from .rules import find_contradictions
from .status import JobStatus
from .training import AlgorithmSpec, EnvironmentSpec, EvaluationSpec, ModelSpec, SamplingSpec

API_VERSION: Final = "inflight.dev/v1alpha1"
KIND: Final = "RLTrainingJob"
MAX_NAME_LENGTH: Final = 40
"""Children's names and their pods' stay under 63 characters with a job name of this length."""
_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_KEY: Final = re.compile(rf"((?=.{{1,253}}/){_DNS}(\.{_DNS})*/)?{_LABEL}")
_VALUE: Final = re.compile(rf"({_LABEL})?")


class Metadata(ApiModel):
    """Kubernetes object metadata. A job file gives `name`, perhaps labels; the rest is the API server's."""

    name: str = Field(
        min_length=1, max_length=MAX_NAME_LENGTH, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", examples=["sort-letters"]
    )
    """Name of the job: lower-case letters, digits and dashes, a letter first (RFC 1035), at most 40 characters."""
    namespace: str | None = Field(default=None, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """Namespace (cluster only)."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations."""
    uid: str | None = None
    """Set by the API server."""
    generation: int | None = None
    """Set by the API server."""
    resource_version: str | None = None
    """Set by the API server."""
    creation_timestamp: str | None = None
    """Set by the API server (RFC 3339)."""
    deletion_timestamp: str | None = None
    """Set by the API server (RFC 3339)."""
    deletion_grace_period_seconds: int | None = None
    """Set by the API server."""
    generate_name: str | None = None
    """Prefix the API server makes a name from."""
    self_link: str | None = None
    """Set by old API servers."""
    finalizers: list[str] = Field(default_factory=list)
    """Kept as they are; Inflight adds none."""
    owner_references: list[dict[str, Any]] = Field(default_factory=list)
    """Objects that own this one."""
    managed_fields: list[dict[str, Any]] = Field(default_factory=list)
    """Set by the API server."""

    @field_validator("labels", "annotations")
    @classmethod
    def _well_formed_keys(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for key in value:
            # The API server minds capital letters in the domain of a label, not of an annotation.
            if _KEY.fullmatch(key.lower() if info.field_name == "annotations" else key) is None:
                raise refusal(
                    f"has the key {key!r}, which is no name of a label or annotation",
                    "write a name of up to 63 letters, digits, dashes, dots and underscores, perhaps after a domain "
                    "and a slash",
                )
        return value

    @field_validator("labels")
    @classmethod
    def _well_formed_labels(cls, value: dict[str, str]) -> dict[str, str]:
        for key, label in value.items():
            if _VALUE.fullmatch(label) is None:
                raise refusal(
                    f"holds {label!r} at {key}, which is no label",
                    "write up to 63 letters, digits, dashes, dots and underscores, or make it an annotation",
                )
        return value


class RLTrainingSpec(ApiModel):
    """A whole run of asynchronous RL training."""

    suspend: bool = False
    """Stop the run, with a checkpoint, and free what it holds; set to false again to go on (cluster only)."""
    model: ModelSpec
    """The language model to train."""
    environment: EnvironmentSpec
    """Prompts, rollouts and rewards."""
    algorithm: AlgorithmSpec
    """The training algorithm."""
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    """How rollouts are sampled."""
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    """How new weights reach the servers."""
    inference: InferenceSpec = Field(default_factory=InferenceSpec)
    """The inference servers."""
    actors: ActorsSpec = Field(default_factory=ActorsSpec)
    """The actors."""
    trainer: TrainerSpec = Field(default_factory=TrainerSpec)
    """The trainer."""
    coordinator: CoordinatorSpec = Field(default_factory=CoordinatorSpec)
    """The coordinator."""
    evaluation: EvaluationSpec | None = None
    """Held-out evaluation; left out: none."""
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """Checkpoints."""
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    """Scheduling."""
    lifecycle: LifecycleSpec = Field(default_factory=LifecycleSpec)
    """Deadlines and cleaning up."""
    logging: LoggingSpec = Field(default_factory=LoggingSpec)
    """What is written down."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        problems = find_contradictions(self)
        if problems:
            raise contradiction(problems)
        return self


class RLTrainingJob(ApiModel):
    """One run of asynchronous RL training with in-flight weight updates."""

    model_config = ConfigDict(title=KIND)

    api_version: Literal["inflight.dev/v1alpha1"]
    """Always `inflight.dev/v1alpha1`."""
    kind: Literal["RLTrainingJob"]
    """Always `RLTrainingJob`."""
    metadata: Metadata
    """Name, namespace and labels."""
    spec: RLTrainingSpec
    """What is wanted."""
    status: JobStatus | None = None
    """What has become of it; written by the operator."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

    def to_wire(self) -> dict[str, Any]:
        """The job as JSON-ready data under its wire names, with only what was given (no defaults filled in)."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
