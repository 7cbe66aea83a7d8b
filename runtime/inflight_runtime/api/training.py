"""Spec sections that say what is trained and how: model, environment, algorithm, sampling, evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from .base import ApiModel, JsonObject, ObjectName, refusal
from .enums import (
    Baseline,
    LossKind,
    Normalization,
    OverAge,
    OverlongPrompt,
    ServerDtype,
    ZeroVariance,
)

_NAME = "[A-Za-z_][A-Za-z0-9_]*"  # not \w, which is ASCII to the API server and Unicode to pydantic
ENTRYPOINT_PATTERN = rf"^{_NAME}(\.{_NAME})*:{_NAME}$"


class SecretKey(ApiModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: str = Field(default="token", min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key inside the Secret."""


class ModelVolume(ApiModel):
    """A model that already lies on a PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the claim, in the job's namespace."""
    sub_path: str = Field(default="", max_length=4096, examples=["models/qwen2.5-0.5b"])
    """Directory of the model inside the claim, relative; empty for its root."""

    @field_validator("sub_path")
    @classmethod
    def _stay_inside(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/"):
            raise refusal("must be a relative path inside the claim", 'write it without a leading "/" and without ".."')
        return value


class ModelSpec(ApiModel):
    """The language model to train: exactly one of `source` and `volume`."""

    source: str | None = Field(default=None, min_length=1, max_length=4096, examples=["./model"])
    """Directory in Hugging Face format (config.json, weights, tokenizer), relative to the job file on one machine, in
    the image in a cluster; or, in a cluster only, a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`."""
    volume: ModelVolume | None = None
    """A claim that holds the model (cluster only)."""
    revision: str | None = Field(default=None, min_length=1, max_length=255)
    """Branch, tag or commit of a hub id."""
    dtype: ServerDtype = "auto"
    """Number format that the inference servers compute in and get weights in. `auto`: bfloat16 on GPUs (it takes an
    Ampere or newer), float32 on CPUs (where it is the faster one)."""
    tokenizer: str | None = Field(default=None, min_length=1, max_length=4096)
    """Directory (or hub id) of the tokenizer when it is not the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    token_secret_ref: SecretKey | None = None
    """Hub token for a gated or private model (cluster only)."""


class EnvironmentSpec(ApiModel):
    """Where prompts, rollouts and rewards come from: one Python class of yours."""

    entrypoint: str = Field(max_length=512, pattern=ENTRYPOINT_PATTERN, examples=["environment:SortLetters"])
    """`package.module:Class`. On one machine the job file's own directory is searched first."""
    args: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the class."""
    config_map: ObjectName | None = None
    """ConfigMap with the environment's Python files (cluster only; on one machine they lie beside the job file)."""
    overlong_prompt: OverlongPrompt = "skip"
    """What to do with a prompt that leaves no room for `sampling.maxTokens`: `skip` it (counted) or `fail` the run."""
    rollout_timeout_seconds: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds one attempt may take, generation included, before it is given up and tried again."""
    reward_timeout_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds the reward of one attempt may take."""
    attempt_retries: int = Field(default=2, ge=0, le=100)
    """How often a failed attempt is tried again before it counts as failed and is left out of its group."""
    max_consecutive_failures: int = Field(default=8, ge=1, le=100_000)
    """Groups in a row whose every attempt failed, after which the run ends with the reason."""


def _default_is_cap(data: dict[str, Any]) -> float | None:
    return None if data.get("kind") == "ppo" else 2.0


def _default_clip(data: dict[str, Any]) -> float | None:
    return 0.2 if data.get("kind") == "ppo" else None


class LossSpec(ApiModel):
    """The policy loss. No value function, no KL term."""

    kind: LossKind = "reinforce_tis"
    """`reinforce_tis`: logprob x advantage x detached min(ratio, isCap). `ppo`: the clipped surrogate."""
    is_cap: float | None = Field(default_factory=_default_is_cap, ge=0, le=1000)
    """Cap of the importance weight in `reinforce_tis`; 0 or null for no cap (plain `kubectl apply` drops nulls).
    Default 2 with `reinforce_tis`; `ppo` has none."""
    clip_low: float | None = Field(default_factory=_default_clip, ge=0, lt=1)
    """`ppo` keeps the ratio above 1 - clipLow. Default 0.2 with `ppo`."""
    clip_high: float | None = Field(default_factory=_default_clip, ge=0, le=100)
    """`ppo` keeps the ratio below 1 + clipHigh. Default 0.2 with `ppo`."""
    entropy_bonus: float = Field(default=0.0, ge=0, le=10)
    """Weight of the policy's entropy (nats per token), added to the objective."""
    normalization: Normalization = "token_sum_per_sequence"
    """Weight of a token, with N attempts in the step: `token_sum_per_sequence` 1/N, `sequence_mean` 1/(N x tokens of
    the attempt), `token_mean` 1/(tokens of the step), `group_mean` 1/(groups x tokens of the group), `constant`
    1/(N x maxTokens)."""


class AdvantageSpec(ApiModel):
    """Group-relative advantages."""

    baseline: Baseline = "leave_one_out"
    """What is subtracted from a reward: the mean of the group's other attempts, or of all of them."""
    divide_by_std: bool = False
    """Divide by the standard deviation of the group's rewards (GRPO as first published)."""


class AlgorithmSpec(ApiModel):
    """Asynchronous GRPO."""

    steps: int = Field(ge=1, le=10_000_000, examples=[500])
    """Optimizer steps of the whole run."""
    prompts_per_step: int = Field(default=128, ge=1, le=1_000_000)
    """Groups in one optimizer step, one prompt each."""
    group_size: int = Field(default=8, ge=2, le=4096)
    """Attempts at each prompt. An advantage is relative to the group, so it takes at least two."""
    loss: LossSpec = Field(default_factory=LossSpec)
    """The policy loss."""
    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec)
    """How rewards become advantages."""
    max_staleness: int = Field(default=4, ge=0, le=1000)
    """How many optimizer steps generation may run ahead of training: at most (maxStaleness + 1) x promptsPerStep groups
    are being generated or wait. 0 is synchronous RL."""
    over_age: OverAge = "keep"
    """What happens to tokens more than maxStaleness steps old: `keep` and count them, `mask` the tokens, or `drop` the
    group."""
    zero_variance: ZeroVariance = "keep"
    """What happens to a group whose rewards are all equal (no signal): `keep` it, `drop` it (a smaller batch), or
    `refill` its place with another group."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of the prompt order, of sampling and of the trainer."""
    shuffle: bool = True
    """Draw the environment's problems in a new random order in each epoch; false: in their own order."""


class SamplingSpec(ApiModel):
    """How training rollouts are sampled: by temperature alone."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """Softmax temperature, the same one in the trainer's logprobs."""
    max_tokens: int = Field(default=8192, ge=1, le=10_000_000)
    """New tokens per generation, at most."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Texts that end a generation, besides the end-of-sequence token."""
    top_p: float | None = None
    """Not supported for training rollouts: only 1 (off) is accepted."""
    top_k: int | None = None
    """Not supported for training rollouts: only -1 or 0 (off) is accepted."""

    @field_validator("top_p")
    @classmethod
    def _no_top_p(cls, value: float | None) -> float | None:
        if value is not None and value != 1:
            raise refusal(
                "nucleus sampling renormalises the probabilities, which biases the importance ratio of every token",
                "remove topP and use sampling.temperature",
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, value: int | None) -> int | None:
        if value is not None and value not in (-1, 0):
            raise refusal(
                "top-k sampling renormalises the probabilities, which biases the importance ratio of every token",
                "remove topK and use sampling.temperature",
            )
        return value


class EvaluationSpec(ApiModel):
    """Held-out evaluation beside training; its rollouts are scored and never trained on."""

    every_steps: int = Field(ge=1, le=10_000_000)
    """Optimizer steps between two evaluations."""
    prompts: int = Field(ge=1, le=1_000_000)
    """Problems of the environment's held-out set in each evaluation."""
    attempts: int = Field(default=1, ge=1, le=4096)
    """Attempts at each of them; their rewards are averaged."""
