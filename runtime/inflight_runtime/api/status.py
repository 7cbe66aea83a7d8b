"""The status of a job: written by the operator, read by people, by kubectl's columns and by GitOps tools."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from .base import ApiModel
from .enums import ConditionStatus, Phase


class StatusModel(ApiModel):
    """Base of the status: a field that a newer operator wrote is passed over, not an error."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One condition, in the form all Kubernetes resources use."""

    type: str = Field(min_length=1, max_length=316)
    """`Validated`, `ResourcesCreated`, `CoordinatorReachable`, `InferenceReady`, `ActorsReady`, `TrainerRunning`,
    `Suspended`, `Complete`, `Failed`, `Ready`, `Reconciling` or `Stalled`."""
    status: ConditionStatus
    """Whether it holds."""
    reason: str = Field(min_length=1, max_length=1024)
    """One word for programs."""
    message: str = Field(default="", max_length=32_768)
    """A sentence for people, with the API server's own words where there are any."""
    last_transition_time: str = ""
    """When `status` last changed (RFC 3339)."""
    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec this was said of."""


class RoleStatus(StatusModel):
    """Replicas of one role."""

    desired: int = Field(default=0, ge=0)
    """How many there should be."""
    ready: int = Field(default=0, ge=0)
    """How many are ready."""


class ScalableRoleStatus(RoleStatus):
    """Replicas of a role that may be scaled while the job runs."""

    selector: str = ""
    """Label selector of its pods, for the scale subresource."""
    replicas_before_suspend: int | None = Field(default=None, ge=0)
    """The count to go back to at resume when the spec names none."""
    replicas_at_start: int | None = Field(default=None, ge=0)
    """The count at the last start or resume, which the pods' configuration was made for."""


class PolicyVersion(StatusModel):
    """A weight version: `step` optimizer steps in `epoch`."""

    epoch: int = Field(ge=0)
    """Raised at each start of the trainer."""
    step: int = Field(ge=0)
    """Optimizer steps completed."""


class Progress(StatusModel):
    """How far the run is, as the coordinator last told."""

    step: int = Field(default=0, ge=0)
    """Optimizer steps done."""
    steps: int = Field(default=0, ge=0)
    """Optimizer steps of the whole run."""
    policy_version: PolicyVersion | None = None
    """Newest weights published."""
    reward_mean: float | None = None
    """Mean reward of the last step's attempts."""
    staleness_mean: float | None = None
    """Mean age of the last step's tokens, in optimizer steps."""
    tokens_per_second: float | None = Field(default=None, ge=0)
    """Sampled tokens trained on per second."""
    groups_trained: int | None = Field(default=None, ge=0)
    """Groups trained on so far."""
    groups_dropped: int | None = Field(default=None, ge=0)
    """Groups dropped so far, for whatever reason."""
    checkpoint_step: int | None = Field(default=None, ge=0)
    """Step of the newest checkpoint on disk."""
    updated_time: str = ""
    """When these numbers were read (RFC 3339)."""


class Endpoints(StatusModel):
    """Where the roles answer inside the cluster."""

    coordinator: str = ""
    """URL of the coordinator."""
    inference: str = ""
    """URL of the OpenAI-compatible service in front of the inference servers."""


class JobStatus(StatusModel):
    """What has become of a job."""

    phase: Phase | None = None
    """The state in one word."""
    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec that this status answers."""
    conditions: list[Condition] = Field(default_factory=list)
    """Conditions, one of each type."""
    coordinator: RoleStatus = Field(default_factory=RoleStatus)
    """The coordinator's replicas."""
    inference: ScalableRoleStatus = Field(default_factory=ScalableRoleStatus)
    """The inference servers' replicas."""
    actors: ScalableRoleStatus = Field(default_factory=ScalableRoleStatus)
    """The actors' replicas."""
    trainer: RoleStatus = Field(default_factory=RoleStatus)
    """The trainer's nodes."""
    restarts: int = Field(default=0, ge=0)
    """Restarts of the trainer since the last start or resume."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that all roles ask for together."""
    starts: int = Field(default=0, ge=0)
    """Starts and resumes so far. Every child carries the number of the start that it was last written for."""
    start_time: str = ""
    """When the job first started (RFC 3339)."""
    active_since: str = ""
    """Since when the job has been active without a break (RFC 3339); empty while it is suspended or over."""
    active_seconds: int = Field(default=0, ge=0)
    """Seconds the job was active before that; `lifecycle.activeDeadlineSeconds` counts both."""
    suspending_since: str = ""
    """When the suspend under way began, from which its deadlines count (RFC 3339)."""
    completion_time: str = ""
    """When it succeeded or failed (RFC 3339)."""
    progress: Progress | None = None
    """How far the run is."""
    endpoints: Endpoints = Field(default_factory=Endpoints)
    """Addresses inside the cluster."""
    images: dict[str, str] = Field(default_factory=dict)
    """Image of each role, as it was resolved at the last start or resume."""
    builder_revision: str = ""
    """Revision of the operator's templates that the running children were made from."""
