"""The HTTP messages between the roles: the one place where both sides of every wire are written down.

Bodies are JSON unless said otherwise. Rollout payloads are msgpack (:func:`inflight_runtime.types.encode_group`).
Every route but ``/healthz``, ``/readyz`` and ``/metrics`` asks for ``Authorization: Bearer <the job's token>``.
Errors answer ``{"error": "<what is wrong, where, how to mend it>"}`` with a fitting status code.

Coordinator
    ====== ================================= ==========================================================================
    POST   /v1/dataset                       DatasetInfo -> 204; 409 when another actor announced another size
    POST   /v1/leases                        LeaseRequest -> LeaseReply; long-polls up to ``wait_seconds``
    POST   /v1/leases/renew                  RenewRequest -> RenewReply
    POST   /v1/leases/release                RenewRequest -> 204; hands groups back unfinished (same group, next fence)
    POST   /v1/groups                        msgpack Group -> 201 SubmitReply, 200 for a duplicate, 409 when fenced off
    POST   /v1/groups/{id}/drop              DropRequest -> 204, 409 when fenced off; the slot is returned
    POST   /v1/trainer/start                 TrainerStart -> TrainerStarted; raises the epoch
    GET    /v1/steps/{step}/batch            ?epoch=&wait_seconds= -> 200 msgpack StepBatch, 204 not ready, 409 stale
    POST   /v1/steps/{step}/commit           StepCommit -> 204, 409 stale epoch; idempotent
    POST   /v1/checkpoints                   CheckpointDurable -> 204; payloads up to ``oldest_step`` may go
    POST   /v1/members                       MemberBeat -> MemberReply; join and heartbeat in one
    POST   /v1/members/{server_id}/leave     ?boot_id= -> 204
    POST   /v1/members/{server_id}/state     MemberState -> 204, 409 when epoch or boot id is not current
    GET    /v1/members                       ?revision=&wait_seconds= -> MembersReply; returns at once if newer
    GET    /v1/samples                       ?step=&limit= -> list of trained attempts as people read them
    POST   /v1/fail                          FailRequest -> 204; the run ends as failed with this reason
    GET    /v1/state                         -> RunState
    ====== ================================= ==========================================================================

Inference server (DESIGN 5.3), whatever its engine
    ====== ================================= ==========================================================================
    POST   /init_process_group               InitGroupRequest -> ServerVersion; joins the pair with the trainer
    POST   /destroy_process_group            DestroyGroupRequest -> 204
    POST   /request_weight_update            WeightUpdateRequest -> WeightUpdateReply; receives, verifies, commits
    GET    /runtime/v1/status                -> ServerStatus (readiness is this, never /health)
    POST   /runtime/v1/generate              GenerateRequest -> GenerateReply
    POST   /v1/chat/completions              OpenAI format, also /v1/chat/completion; /v1/completions; /v1/models
    ====== ================================= ==========================================================================
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ServerState = Literal["JOINING", "SYNCING", "READY", "UPDATING", "EVICTED"]
"""JOINING -> SYNCING -> READY(v) <-> UPDATING -> READY(v'); any -> EVICTED -> JOINING. Only READY servers and those
UPDATING (they go on generating) get requests."""
Outcome = Literal["running", "succeeded", "failed"]
DropReason = Literal["prompt_too_long", "attempts_failed"]


class Message(BaseModel):
    """Base of all messages: unknown fields are refused, so a version skew between images is loud."""

    model_config = ConfigDict(extra="forbid")


class VersionField(Message):
    """A weight version on the wire."""

    epoch: int = Field(ge=0)
    step: int = Field(ge=0)


# --- leases and rollouts ----------------------------------------------------------------------------------------------


class DatasetInfo(Message):
    """What an actor's environment offers; the sampler runs over problem indices 0..size-1 (``None``: endless)."""

    actor_id: str
    size: int | None = Field(default=None, ge=1)
    eval_size: int | None = Field(default=None, ge=0)


class LeaseRequest(Message):
    """Ask for work."""

    actor_id: str
    request_id: str
    """Made fresh for each new request; a retry after a lost reply repeats it and gets the same leases again."""
    max_groups: int = Field(ge=1)
    wait_seconds: float = Field(default=5.0, ge=0, le=30)


class Lease(Message):
    """The right to produce one group. ``kind`` eval: held-out, scored and never trained on."""

    group_id: int
    fence: int
    kind: Literal["train", "eval"] = "train"
    problem_index: int
    attempts: int
    min_version: VersionField
    """Only servers at this version or later may serve it: the current version under ``maxStaleness: 0`` (what makes it
    synchronous), else (0, 0), any ready server."""
    ttl_seconds: float


class LeaseReply(Message):
    """Leases, possibly none; ``finished`` tells the actor that the run is over."""

    leases: list[Lease] = Field(default_factory=list)
    finished: bool = False
    reason: str = ""
    """Why there is nothing to lease (``staleness bound``, ``no ready server``, ...)."""


class LeaseRef(Message):
    """Names one lease."""

    group_id: int
    fence: int


class RenewRequest(Message):
    """Heartbeat for (or release of) leases."""

    actor_id: str
    leases: list[LeaseRef]


class RenewReply(Message):
    """Leases that are no longer this actor's: stop working on them."""

    lost: list[LeaseRef] = Field(default_factory=list)


class SubmitReply(Message):
    """What became of a submitted group: ``dropped`` names the reason when it will not be trained."""

    state: Literal["completed", "dropped", "evaluated"]
    reason: str = ""


class DropRequest(Message):
    """Give up one group. ``detail`` is shown to the user."""

    fence: int
    reason: DropReason
    detail: str = ""


# --- trainer ----------------------------------------------------------------------------------------------------------


class TrainerStart(Message):
    """A trainer begins at ``resume_step`` optimizer steps (0: fresh)."""

    resume_step: int = Field(ge=0)


class TrainerStarted(Message):
    """Its epoch, to be named in every further call; an older epoch gets 409 from now on."""

    epoch: int
    steps: int


class StepCommit(Message):
    """Step ``step`` is trained; ``metrics`` are the numbers shown as progress."""

    epoch: int
    metrics: dict[str, float] = Field(default_factory=dict)


class CheckpointDurable(Message):
    """A checkpoint is on disk; ``oldest_step`` is the oldest one retained."""

    epoch: int
    step: int
    oldest_step: int
    path: str = ""


# StepBatch (msgpack map): {"step": int, "policy_step": step-1, "planned_groups": B,
#   "excluded": {reason: count}, "groups": [encode_group(...) bytes, in group id order]}.


# --- membership -------------------------------------------------------------------------------------------------------


class MemberBeat(Message):
    """An inference server announces itself, again and again. A new ``boot_id`` starts over at JOINING."""

    server_id: str
    boot_id: str
    url: str
    engine: str
    world_size: int = 1
    capacity: int = Field(ge=1)
    """Sequences it generates at once."""
    max_length: int = Field(ge=1)
    version: VersionField | None = None
    broken: str = ""
    """Why the server cannot serve right weights any more; it is evicted until it restarts."""
    running: int = 0
    waiting: int = 0
    last_pause_ms: float | None = None


class MemberReply(Message):
    """``known`` is false right after a join."""

    known: bool
    state: ServerState


class MemberState(Message):
    """The publisher tells a server's state."""

    epoch: int
    boot_id: str
    state: ServerState
    version: VersionField | None = None
    reason: str = ""
    update_ms: float | None = None
    pause_ms: float | None = None


class Member(Message):
    """One server as everybody sees it."""

    server_id: str
    boot_id: str
    url: str
    engine: str
    world_size: int
    capacity: int
    max_length: int
    state: ServerState
    version: VersionField | None = None
    reason: str = ""
    running: int = 0
    waiting: int = 0
    last_pause_ms: float | None = None
    last_update_ms: float | None = None
    seconds_since_beat: float = 0.0


class MembersReply(Message):
    """A snapshot of the membership; ``revision`` grows with every change that matters to routing."""

    revision: int
    epoch: int
    policy_version: VersionField
    finished: bool
    members: list[Member]


# --- run --------------------------------------------------------------------------------------------------------------


class FailRequest(Message):
    """End the run as failed."""

    source: str
    reason: str


class RunState(Message):
    """Everything that is shown of a run."""

    job: str
    outcome: Outcome
    reason: str = ""
    epoch: int
    step: int
    steps: int
    policy_version: VersionField
    groups: dict[str, int]
    """``submitted`` and the states ``leased, completed, assigned, trained, dropped``, whose sum it always equals."""
    dropped: dict[str, int]
    attempts_failed: int
    duplicates: int
    fenced: int
    leases_expired: int
    capacity: dict[str, int]
    """``outstanding`` (leased + waiting) and its ``bound`` (eta+1)*B, ``leased`` and its ``cap``."""
    metrics: dict[str, float]
    """The newest step's metrics."""
    evaluation: dict[str, float] = Field(default_factory=dict)
    checkpoint_step: int | None = None
    trainer_starts: int = 0
    steps_skipped: int = 0
    """Steps that changed no weights, counted again when they are replayed."""
    actors: int = 0
    members: list[Member] = Field(default_factory=list)
    seconds: float = 0.0


# --- inference --------------------------------------------------------------------------------------------------------


class InitGroupRequest(Message):
    """Join a weight-update group: one pair of the star. The trainer is rank 0, this server's workers are 1..world-1.

    Both sides: TCPStore client of ``master_address:master_port``, PrefixStore ``tag``, a process group of its own
    beside every default group.
    """

    epoch: int
    tag: str
    world_size: int = 2
    master_address: str
    master_port: int
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_seconds: float = 60.0


class ServerVersion(Message):
    """What a server serves, and which life of it this is."""

    boot_id: str
    version: VersionField | None = None


class DestroyGroupRequest(Message):
    """Leave the group of this tag (a no-op when it is not there)."""

    tag: str


class TensorSpec(Message):
    """One tensor of a snapshot, in HF checkpoint names."""

    name: str
    dtype: str
    shape: list[int]
    digest: str
    """Hex of the modular weighted sum of the tensor's bytes (``weights.digest``)."""


class WeightUpdateRequest(Message):
    """Receive, verify and commit one snapshot. Tensors come packed in this order, cut into ``buckets`` of bytes."""

    epoch: int
    step: int
    tag: str
    tensors: list[TensorSpec]
    bucket_bytes: int
    digest: str
    """Digest of the whole manifest (names, dtypes, shapes, tensor digests)."""
    timeout_seconds: float = 60.0


class WeightUpdateReply(Message):
    """The server now serves ``(epoch, step)``; times in milliseconds."""

    epoch: int
    step: int
    boot_id: str
    digest: str
    receive_ms: float
    pause_ms: float
    commit_ms: float


class ServerStatus(Message):
    """What a server is, and whether it may be used."""

    server_id: str
    boot_id: str
    engine: str
    version: VersionField | None
    digest: str = ""
    broken: str = ""
    world_size: int = 1
    capacity: int
    max_length: int
    running: int = 0
    waiting: int = 0
    updates: int = 0
    last_receive_ms: float | None = None
    last_pause_ms: float | None = None
    last_commit_ms: float | None = None
    groups: list[str] = Field(default_factory=list)
    """Tags of the weight-update groups it is in."""


class GenerateRequest(Message):
    """Token ids in. ``n`` answers to one prompt; answer i draws from ``seeds[i]`` where the engine can."""

    prompt_ids: list[int]
    n: int = Field(default=1, ge=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    seeds: list[int] | None = None
    ignore_eos: bool = False
    request_id: str = ""


class WireSpan(Message):
    """Answer tokens ``[start, end)`` were sampled under ``(epoch, step)``."""

    epoch: int
    step: int
    start: int
    end: int


class Completion(Message):
    """One answer: ids with the end-of-sequence token if it was sampled, one logprob each, spans that tile them."""

    ids: list[int]
    logprobs: list[float]
    spans: list[WireSpan]
    finish: Literal["stop", "length", "abort"]


class GenerateReply(Message):
    """Answers of one request."""

    server_id: str
    boot_id: str
    completions: list[Completion]


class ErrorReply(Message):
    """Every error body."""

    error: str
    detail: dict[str, Any] | None = None
