"""What each role's process is told: one strict model per role, rendered from a job's spec by :mod:`.render`.

The same file starts a pod and a local process: ``python -m inflight_runtime.<role> --config FILE``. No secret stands in
it: the job's bearer token is read from ``token_file``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
OverAge = Literal["keep", "mask", "drop"]
ZeroVariance = Literal["keep", "drop", "refill"]
LossKind = Literal["reinforce_tis", "ppo"]
Normalization = Literal["token_sum_per_sequence", "sequence_mean", "token_mean", "group_mean", "constant"]
Baseline = Literal["leave_one_out", "mean"]
Transport = Literal["auto", "gloo", "nccl"]
KvCache = Literal["keep", "recompute"]
EngineKind = Literal["vllm", "reference"]
OverlongPrompt = Literal["skip", "fail"]


RoleT = TypeVar("RoleT", bound="RoleModel")


class RoleModel(BaseModel):
    """Base of all role configs: immutable, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFiles(RoleModel):
    """Where a role finds the model on its own disk."""

    path: str
    tokenizer: str
    dtype: Dtype = "float32"
    """What the role computes in."""
    trust_remote_code: bool = False
    max_length: int
    """Longest sequence, prompt and answer together, in tokens; 0 in a file for a pod: as the model's files say."""
    wait_s: float = 0.0
    """How long the files may still be on their way when the role starts."""


class Sampling(RoleModel):
    """How training rollouts are sampled: by temperature alone (top-p and top-k bias the importance ratio)."""

    temperature: float = 1.0
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0


class EnvironmentSpec(RoleModel):
    """Which environment class to load and with which keyword arguments."""

    entrypoint: str
    args: dict[str, Any] = Field(default_factory=dict)
    search_path: tuple[str, ...] = ()
    """Directories put in front of ``sys.path`` before the import."""
    rollout_timeout_s: float = 600.0
    reward_timeout_s: float = 60.0
    attempt_retries: int = 2
    max_consecutive_failures: int = 8
    """Groups in a row whose every attempt failed, after which the run ends with the reason."""
    overlong_prompt: OverlongPrompt = "skip"


class Evaluation(RoleModel):
    """Held-out evaluation beside training."""

    every_steps: int
    prompts: int
    attempts: int = 1


class CoordinatorConfig(RoleModel):
    """The coordinator: ledger, admission, membership, versions, progress."""

    job: str
    host: str = "127.0.0.1"
    port: int
    data_dir: Path
    token_file: Path
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    over_age: OverAge = "keep"
    zero_variance: ZeroVariance = "keep"
    lease_ttl_s: float = 60.0
    member_ttl_s: float = 10.0
    max_empty_batches: int = 50
    max_leased_groups: int | None = None
    """Cap on groups generated at once; by default what the ready servers say they hold."""
    shuffle: bool = True
    seed: int = 0
    evaluation: Evaluation | None = None


class InferenceConfig(RoleModel):
    """One inference server."""

    job: str
    server_id: str
    engine: EngineKind
    host: str = "127.0.0.1"
    port: int
    advertise_url: str
    """URL under which actors and the trainer reach this server."""
    coordinator_url: str
    token_file: Path
    model: ModelFiles
    served_name: str
    kv_cache: KvCache = "keep"
    max_concurrent: int = 64
    """Sequences generated at once (vLLM's max-num-seqs)."""
    tensor_parallel: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    cpu_kv_cache_bytes: int = 256 * 1024 * 1024
    threads: int = 1
    update_deadline_s: float = 60.0
    heartbeat_s: float = 1.0
    seed: int = 0
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Extra engine flags, in the engine's own spelling (``max-num-batched-tokens: 1024``)."""
    faults: dict[str, Any] = Field(default_factory=dict)
    """Fault switches of the reference engine, for tests; empty in every real run."""


class ActorConfig(RoleModel):
    """One actor process."""

    job: str
    actor_id: str
    host: str = "127.0.0.1"
    health_port: int = 0
    """Port of ``/healthz``, ``/readyz`` and ``/metrics``; 0 leaves them off."""
    coordinator_url: str
    token_file: Path
    model: ModelFiles
    served_name: str
    environment: EnvironmentSpec
    sampling: Sampling
    group_size: int
    concurrency: int
    """Groups in flight at once in this process."""
    request_timeout_s: float = 600.0
    request_retries: int = 5
    seed: int = 0


class LossConfig(RoleModel):
    """The policy loss. ``reinforce_tis``: logprob x advantage x sg[min(ratio, is_cap)]; ``ppo``: clipped."""

    kind: LossKind = "reinforce_tis"
    is_cap: float | None = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_bonus: float = 0.0
    normalization: Normalization = "token_sum_per_sequence"


class AdvantageConfig(RoleModel):
    """Group-relative advantages."""

    baseline: Baseline = "leave_one_out"
    divide_by_std: bool = False


class OptimizerConfig(RoleModel):
    """AdamW and its schedule."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip_norm: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0


class CheckpointConfig(RoleModel):
    """When and where checkpoints are written."""

    dir: Path
    every_steps: int = 0
    """0: only at the end and on SIGTERM."""
    keep: int = 3
    stop_s: float = 60.0
    """From the first SIGTERM to the end of the process, whatever it is doing then."""
    resume: Literal["auto", "never"] = "auto"
    resume_from: Path | None = None
    """A checkpoint directory of another run to start from (weights and optimizer, step 0 of the new run)."""


class WeightSyncConfig(RoleModel):
    """How new weights reach the servers."""

    transport: Transport = "auto"
    interval_steps: int = 1
    deadline_s: float = 60.0
    bucket_bytes: int = 256 * 1024 * 1024
    bind_host: str = "127.0.0.1"
    """Address under which servers reach the trainer's rendezvous."""
    dtype: Dtype = "float32"
    """What weights are sent in: the servers' own."""


class TrainerConfig(RoleModel):
    """One trainer rank (all ranks read the same file)."""

    job: str
    coordinator_url: str
    token_file: Path
    model: ModelFiles
    engine: Literal["single", "fsdp2", "deepspeed"] = "single"
    zero_stage: Literal[1, 2, 3] = 2
    """Of engine ``deepspeed``: what is split over the ranks: 1 optimizer states, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Of ``fsdp2`` and ``deepspeed``: the rank's part of the float32 weights and of the optimizer's moments stays in
    host memory, and the CPU steps; with ``fsdp2`` that of the gradients, too."""
    activation_checkpointing: bool = False
    """Blocks keep their inputs alone for the backward pass, which computes them again."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    over_age: OverAge = "keep"
    temperature: float = 1.0
    max_tokens: int
    micro_batch_tokens: int
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig
    log_dir: Path
    """Directory of ``metrics.jsonl``, ``rollouts.jsonl`` and ``tensorboard/``."""
    rollouts_per_step: int = 32
    """Attempts of each step written to ``rollouts.jsonl``."""
    seed: int = 0


def load_role_config(model: type[RoleT], path: Path) -> RoleT:
    """Read a rendered role config, and fill in what it leaves to the pod (:mod:`.pod`).

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not fit ``model`` (pydantic's ValidationError is one), or cannot be completed here.
    """
    from inflight_runtime.config.pod import complete  # noqa: PLC0415  it needs the models of this module

    return complete(model.model_validate_json(path.read_text()), os.environ)
