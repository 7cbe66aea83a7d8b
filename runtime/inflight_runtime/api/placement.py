"""Spec sections that say where and with how much a run runs: the roles, checkpoints, lifecycle."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import Field, field_validator

from .base import MAX_MAP_ENTRIES, ApiModel, JsonObject, ObjectName, Quantity, refusal
from .enums import (
    AccessMode,
    InferenceEngine,
    KvCache,
    OnDelete,
    OnFailure,
    Schedule,
    TrainerEngine,
    TrainerPrecision,
    Transport,
    ZeroStage,
)
from .overlay import without_nulls

RESERVED_ENGINE_ARGS: Final = {
    "model": "set spec.model.source",
    "tokenizer": "set spec.model.tokenizer",
    "revision": "set spec.model.revision",
    "trust-remote-code": "set spec.model.trustRemoteCode",
    "dtype": "set spec.model.dtype",
    "served-model-name": "it is the job's name",
    "tensor-parallel-size": "set spec.inference.tensorParallel",
    "max-num-seqs": "set spec.inference.maxConcurrent",
    "seed": "set spec.algorithm.seed",
    "host": "addresses are given by the run",
    "port": "addresses are given by the run",
    "uds": "addresses are given by the run",
    "root-path": "the roles call the server's routes where they are",
    "headless": "the roles call the server's routes",
    "skip-tokenizer-init": "the chat route needs the tokenizer",
    "api-server-count": "weight updates need one API process per server",
    "api-key": "every run makes its own token",
    "worker-extension-cls": "Inflight's own extension receives the weights",
    "worker-cls": "Inflight's own extension receives the weights",
    "weight-transfer-config": "weights are received by Inflight's own extension; see spec.weightSync",
    "load-format": "the first weights come from spec.model, the next ones from the trainer",
    "logprobs-mode": "training needs the logprobs of the distribution that was sampled from",
    "generation-config": "a model's own top-p or top-k would bias the importance ratio; see spec.sampling",
    "override-generation-config": "a top-p or top-k would bias the importance ratio; see spec.sampling",
    "pipeline-parallel-size": "weight updates reach tensor-parallel servers only; set spec.inference.tensorParallel",
    "data-parallel-size": "raise spec.inference.replicas instead",
    "quantization": "updated weights cannot be loaded into a quantised model",
    "speculative-config": "a draft model would stay at its first weights",
    "enable-lora": "the whole model is trained and updated",
    "config": "write its flags into engineArgs",
}
"""Engine flags that the run sets itself, with what to do instead."""
COUNTED_ENGINE_ARGS: Final = ("max-model-len", "kv-cache-memory-bytes")
"""Engine flags that the run itself reads: whole numbers above 0."""
MAX_COUNT: Final = 2**53
"""Above this a number may come out of the API server as another one."""


class Resources(ApiModel):
    """Kubernetes resource requests and limits (cluster only)."""

    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=MAX_MAP_ENTRIES)
    """What is reserved: `cpu`, `memory`, `nvidia.com/gpu`, ..."""
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=MAX_MAP_ENTRIES)
    """What may be used at most."""


class Storage(ApiModel):
    """A claim to be made (cluster only)."""

    size: Quantity = Field(default="10Gi", examples=["50Gi"])
    """Capacity, for instance `50Gi`."""
    class_: ObjectName | None = Field(default=None, alias="class")
    """StorageClass; the cluster's default when it is left out."""
    access_modes: list[AccessMode] = Field(
        default_factory=lambda: list[AccessMode](["ReadWriteOnce"]), min_length=1, max_length=3
    )
    """Access modes of the claim."""


class PodRole(ApiModel):
    """What every role's pod may be given (cluster only)."""

    resources: Resources = Field(default_factory=Resources)
    """Resource requests and limits of the role's container (cluster only)."""
    pod_template: JsonObject = Field(default_factory=dict)
    """A partial PodTemplateSpec, merged strategically into the pod that is built for the role (cluster only)."""

    @field_validator("pod_template")
    @classmethod
    def _only_a_pod_template(cls, value: dict[Any, Any]) -> dict[Any, Any]:
        for key in value:
            if key not in ("metadata", "spec"):
                raise refusal(f"has no field {key!r}", f"a pod template has metadata and spec; write it as spec.{key}")
        return without_nulls(value)


# Not \S: what counts as a space is not the same to pydantic and to the API server.
Image = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[!-~]+$", examples=["ghcr.io/me/my-env:1.0"])]


class WeightSyncSpec(ApiModel):
    """How new weights reach the servers, while these go on generating."""

    transport: Transport = "auto"
    """`gloo` through host memory, `nccl` between GPUs, or `auto`: nccl where trainer and servers have GPUs of their
    own, else gloo."""
    kv_cache: KvCache = "keep"
    """Of sequences being generated at an update: `keep` their keys and values (faster), or `recompute` them under the
    new weights."""
    interval_steps: int = Field(default=1, ge=1, le=1000)
    """Optimizer steps between two publications."""
    deadline_seconds: float = Field(default=60.0, ge=1, le=3600)
    """Seconds a server may take for one update; one that takes longer is evicted, never waited for."""


def _flag_spelling(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name.strip().lstrip("-")).lower()
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") or "for instance max-num-batched-tokens"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


class InferenceSpec(PodRole):
    """The inference servers."""

    engine: InferenceEngine = "vllm"
    """`vllm`, or `reference`: a small, slow and deterministic transformers server for tests and for reading."""
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """Servers. Left out: one to begin with, and in a cluster a HorizontalPodAutoscaler may own the number."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs over which one server splits the model."""
    engine_args: JsonObject = Field(default_factory=dict)
    """More flags of the engine in its own spelling without dashes in front, for instance
    `max-num-batched-tokens: 1024`. `max-model-len` shortens the longest sequence; `kv-cache-memory-bytes` sizes the KV
    cache on a CPU."""
    max_concurrent: int = Field(default=64, ge=1, le=65_536)
    """Sequences one server generates at once."""
    image: Image | None = None
    """Container image (cluster only)."""

    @field_validator("engine_args")
    @classmethod
    def _only_free_flags(cls, value: dict[Any, Any]) -> dict[Any, Any]:
        for name, setting in value.items():
            spelling = name.lstrip("-").replace("_", "-")
            # `model.x` sets a part of a structured flag, `no-x` unsets one.
            flag = spelling.partition(".")[0].removeprefix("no-")
            if flag in RESERVED_ENGINE_ARGS:
                raise refusal(f"{name} is set by the run itself", f"remove it: {RESERVED_ENGINE_ARGS[flag]}")
            if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*(\.\w+)*", name) is None:
                raise refusal(f"{name!r} is not spelt as a flag of the engine", f"write {_flag_spelling(name)}")
            if setting is None:
                raise refusal(f"{name} has no value", "give one (true for a bare flag), or remove it")
        for name in COUNTED_ENGINE_ARGS:
            if name in value and not _is_count(setting := value[name]):
                raise refusal(f"{name} must be a whole number above 0, and is {setting!r}", "give a plain number")
        return value


class ActorsSpec(PodRole):
    """The actors: they lease prompts, run the environment, and submit groups of scored attempts."""

    replicas: int | None = Field(default=None, ge=0, le=1000)
    """Actor processes. Left out: one to begin with, and in a cluster a HorizontalPodAutoscaler may own the number."""
    concurrency: int | None = Field(default=None, ge=1, le=65_536)
    """Groups in flight at once in one actor. Left out: enough of them to keep all servers full, and no more than
    (maxStaleness + 1) x promptsPerStep over all actors."""
    image: Image | None = None
    """Container image (cluster only)."""


class OptimizerSpec(ApiModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2
    )
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    """Decoupled weight decay."""
    grad_clip_norm: float | None = Field(default=1.0, ge=0, le=1_000_000)
    """Global gradient norm above which gradients are scaled down; 0 or null for no clipping (plain `kubectl apply`
    drops nulls)."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up, up to `algorithm.steps`."""
    warmup_steps: int = Field(default=0, ge=0, le=10_000_000)
    """Optimizer steps of linear warm-up."""


class TrainerSpec(PodRole):
    """The trainer."""

    engine: TrainerEngine = "single"
    """`single`: one process that holds the whole model. `fsdp2`: the model, its gradients and the optimizer's state are
    sharded over nodes x processesPerNode ranks (PyTorch's fully_shard). `deepspeed`: the ranks share what zeroStage
    says."""
    zero_stage: ZeroStage = 2
    """What the ranks of `deepspeed` split: 1 the optimizer's states, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Whether the optimizer of `fsdp2` or `deepspeed` runs on the CPU and keeps its states and its float32 weights in
    host memory. With `fsdp2` gradients are there, too, and weights come to the GPU block by block: the least GPU
    memory."""
    activation_checkpointing: bool = False
    """Whether the forward pass keeps only the inputs of each block of the model, and the backward pass computes the
    rest again: less memory for long sequences, for about a third more computing. May change at a resume."""
    nodes: int = Field(default=1, ge=1, le=1000)
    """Machines. The `single` engine runs on one."""
    processes_per_node: int = Field(default=1, ge=1, le=64)
    """Ranks on each machine. The `single` engine has one."""
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    """The optimizer."""
    micro_batch_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Token budget of one forward and backward pass. A group of up to 8192 tokens (its prompt once, and groupSize x
    maxTokens) must fit whole; of a longer one, each attempt. Left out: 8192, or the longest sequence if that is
    more."""
    precision: TrainerPrecision = "auto"
    """Number format that the trainer computes in. `auto`: that of the servers on GPUs, float32 on CPUs. Weights, their
    gradients and the optimizer are float32 in any case, since bfloat16 weights would lose steps of 1e-6."""
    max_restarts: int = Field(default=3, ge=0, le=1000)
    """How often a trainer that failed is started again, from its last checkpoint."""
    image: Image | None = None
    """Container image (cluster only)."""


class CoordinatorSpec(PodRole):
    """The coordinator: the ledger of all groups, and who is in the run."""

    storage: Storage = Field(default_factory=Storage)
    """Claim of the ledger and of the rollouts not yet covered by a checkpoint (cluster only)."""


class CheckpointSpec(ApiModel):
    """When and where the trainer saves: weights in Hugging Face format plus what is needed to go on."""

    every_steps: int = Field(default=50, ge=0, le=10_000_000)
    """Optimizer steps between two checkpoints; 0: only at the end and when the run is stopped."""
    keep: int = Field(default=3, ge=1, le=10_000)
    """How many of the newest checkpoints stay."""
    stop_seconds: int = Field(default=60, ge=10, le=86_400)
    """Seconds that the trainer has, once it is told to stop, for the step in progress and its checkpoint; then it ends
    with the checkpoint before. The grace periods of its processes and pods follow from this."""
    storage: Storage | None = None
    """Claim to be made for them (cluster only; 10Gi when neither this nor claimName is given)."""
    claim_name: ObjectName | None = None
    """An existing claim for them (cluster only)."""
    on_delete: OnDelete = "Retain"
    """Whether a claim that was made for the job outlives it (cluster only)."""
    resume_from: str | None = Field(default=None, min_length=1, max_length=4096)
    """Checkpoint directory of another run whose weights and optimizer this one starts from, at step 0. Relative to the
    job file on one machine."""


class SchedulingSpec(ApiModel):
    """How pods are scheduled (cluster only)."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of all pods of the job."""


class LifecycleSpec(ApiModel):
    """How long the run and what is left of it may live."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=315_360_000)
    """Seconds of running (suspended time does not count) after which the run fails."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """Seconds after the end when the pods that are left are removed; the resource and its status stay (cluster
    only)."""
    on_failure: OnFailure = "keep"
    """Whether the pods of a failed run are kept for debugging (cluster only)."""


class LoggingSpec(ApiModel):
    """What is written down of a run."""

    rollouts_per_step: int = Field(default=32, ge=0, le=1_000_000)
    """Attempts of each step written to `rollouts.jsonl`, as people read them."""
