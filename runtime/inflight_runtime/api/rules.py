"""Combinations of fields that cannot work, or would silently do nothing. Pure: a spec in, problems out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from .errors import Problem, show
from .overlay import find_overlay_problems

if TYPE_CHECKING:
    from .job import RLTrainingSpec


DEFAULT_MICRO_BATCH_TOKENS: Final = 8192
"""Token budget of a micro-batch where the spec gives none, unless one sequence alone is longer."""


def find_contradictions(spec: RLTrainingSpec) -> list[Problem]:
    """All combinations in a well-typed spec that are refused."""
    return [problem for rule in _RULES for problem in rule(spec)]


def is_accelerator(resource: str) -> bool:
    """Whether a Kubernetes resource is a GPU, or a part of one, that torch calls ``cuda``."""
    return resource.startswith("nvidia.com/") or resource.endswith("/gpu")


def looks_like_path(source: str) -> bool:
    """Whether a model source is written as a path (``./model``, ``/models/x``); ``org/name`` may be either."""
    return source.startswith(("/", "./", "../", "~")) or source in (".", "..")


def _model(spec: RLTrainingSpec) -> Iterator[Problem]:
    model = spec.model
    if model.source is None and model.volume is None:
        yield Problem(
            "spec.model",
            None,
            "says not where the model is",
            "set spec.model.source (a directory or a hub id) or spec.model.volume (a claim)",
        )
    if model.source is not None and model.volume is not None:
        yield Problem("spec.model", None, "has both source and volume", "keep one of them")
    for name, path in (("source", model.source), ("tokenizer", model.tokenizer)):
        if path is not None and path.startswith("~"):
            yield Problem(f"spec.model.{name}", show(path), '"~" is not expanded', "write the whole path")
    if model.volume is not None or (model.source is not None and looks_like_path(model.source)):
        remedy = "remove it, or give a hub id as spec.model.source"
        if model.revision is not None:
            yield Problem("spec.model.revision", show(model.revision), "belongs to a hub id only", remedy)
        if model.token_secret_ref is not None:
            yield Problem("spec.model.tokenSecretRef", None, "belongs to a hub id only", remedy)


def _loss(spec: RLTrainingSpec) -> Iterator[Problem]:
    loss = spec.algorithm.loss
    at = "spec.algorithm.loss"
    if loss.kind == "ppo" and loss.is_cap is not None:
        yield Problem(
            f"{at}.isCap",
            show(loss.is_cap),
            "has no meaning with kind ppo, which clips the ratio instead",
            "remove it, or set kind: reinforce_tis",
        )
    if loss.kind == "reinforce_tis":
        for name, value in (("clipLow", loss.clip_low), ("clipHigh", loss.clip_high)):
            if value is not None:
                yield Problem(
                    f"{at}.{name}",
                    show(value),
                    "has no meaning with kind reinforce_tis, which caps the importance weight instead",
                    "remove it (see isCap), or set kind: ppo",
                )


def _budget(spec: RLTrainingSpec) -> Iterator[Problem]:
    # A group of up to 8192 tokens must fit whole: split over rows, its prompt would be computed twice. Of a longer one
    # an attempt must fit, which cannot be cut.
    budget = spec.trainer.micro_batch_tokens
    size, tokens = spec.algorithm.group_size, spec.sampling.max_tokens
    group = size * tokens + 1
    whole = group <= DEFAULT_MICRO_BATCH_TOKENS
    least = group if whole else tokens + 1
    if budget is not None and budget < least:
        what = f"one group: {size} attempts" if whole else "one attempt"
        yield Problem(
            "spec.trainer.microBatchTokens",
            show(budget),
            f"cannot hold {what} of up to {tokens} tokens and the prompt",
            f"raise it to {least} and the length of your prompts, lower spec.sampling.maxTokens"
            f"{' or spec.algorithm.groupSize' if whole else ''}, or leave it out",
        )


def _concurrency(spec: RLTrainingSpec) -> Iterator[Problem]:
    held, group = spec.inference.max_concurrent, spec.algorithm.group_size
    if (spec.inference.replicas or 1) > 1 and held < group:
        yield Problem(
            "spec.inference.maxConcurrent",
            show(held),
            f"groups are given out whole, and no server could hold one of {group} attempts: all but one would idle",
            f"set it to {group} or more, or lower spec.algorithm.groupSize",
        )


def _staleness(spec: RLTrainingSpec) -> Iterator[Problem]:
    interval, bound = spec.weight_sync.interval_steps, spec.algorithm.max_staleness
    if interval > bound + 1:
        yield Problem(
            "spec.weightSync.intervalSteps",
            show(interval),
            f"makes tokens up to {interval - 1} steps old, and spec.algorithm.maxStaleness is {bound}",
            f"set it to {bound + 1} or less, or raise maxStaleness to {interval - 1}",
        )


def _lengths(spec: RLTrainingSpec) -> Iterator[Problem]:
    longest = spec.inference.engine_args.get("max-model-len")
    if isinstance(longest, int) and spec.sampling.max_tokens >= longest:
        yield Problem(
            "spec.sampling.maxTokens",
            show(spec.sampling.max_tokens),
            f"leaves no room for a prompt: spec.inference.engineArgs.max-model-len is {longest}, prompt and answer "
            "together",
            f"set it below {longest}, or raise max-model-len",
        )


def _schedule(spec: RLTrainingSpec) -> Iterator[Problem]:
    steps = spec.algorithm.steps
    warmup = spec.trainer.optimizer.warmup_steps
    if warmup >= steps:
        yield Problem(
            "spec.trainer.optimizer.warmupSteps",
            show(warmup),
            f"the run ends before the warm-up does: spec.algorithm.steps is {steps}",
            f"set it below {steps}",
        )
    evaluation = spec.evaluation
    if evaluation is not None and evaluation.every_steps > steps:
        yield Problem(
            "spec.evaluation.everySteps",
            show(evaluation.every_steps),
            f"nothing would be evaluated: spec.algorithm.steps is {steps}",
            f"set it to {steps} or less, or remove spec.evaluation",
        )


def _trainer(spec: RLTrainingSpec) -> Iterator[Problem]:
    trainer = spec.trainer
    for name, value in (("nodes", trainer.nodes), ("processesPerNode", trainer.processes_per_node)):
        if trainer.engine == "single" and value > 1:
            yield Problem(
                f"spec.trainer.{name}",
                show(value),
                "the engine single is one process that holds the whole model",
                "set it to 1, or use fsdp2 or deepspeed",
            )
    if trainer.engine != "deepspeed" and trainer.zero_stage != 2:
        yield Problem(
            "spec.trainer.zeroStage",
            show(trainer.zero_stage),
            f"the engine {trainer.engine} has no such option",
            "remove it, or set spec.trainer.engine to deepspeed",
        )
    if trainer.engine == "single" and trainer.offload_optimizer:
        yield Problem(
            "spec.trainer.offloadOptimizer",
            show(True),
            "the engine single has no such option",
            "remove it, or set spec.trainer.engine to fsdp2 or deepspeed",
        )
    ranks, sequences = (
        trainer.nodes * trainer.processes_per_node,
        spec.algorithm.prompts_per_step * spec.algorithm.group_size,
    )
    if ranks > sequences and trainer.engine != "single":
        yield Problem(
            "spec.trainer.processesPerNode",
            show(trainer.processes_per_node),
            f"a step has {sequences} sequences (promptsPerStep x groupSize), and there would be {ranks} ranks: some "
            "would never have work",
            f"lower nodes x processesPerNode to {sequences} or less, or raise spec.algorithm.promptsPerStep",
        )


def _gpus_of_ranks(spec: RLTrainingSpec) -> Iterator[Problem]:
    trainer = spec.trainer
    for name, amount in (trainer.resources.requests | trainer.resources.limits).items():
        if is_accelerator(name) and str(amount).isdecimal() and 0 < int(str(amount)) < trainer.processes_per_node:
            yield Problem(
                "spec.trainer.processesPerNode",
                show(trainer.processes_per_node),
                f"each rank needs a GPU of its own, and spec.trainer.resources gives a node {amount} ({name})",
                f"set it to {amount} or less, or raise {name}",
            )


def _reference(spec: RLTrainingSpec) -> Iterator[Problem]:
    inference = spec.inference
    if inference.engine != "reference":
        return
    if inference.tensor_parallel > 1:
        yield Problem(
            "spec.inference.tensorParallel",
            show(inference.tensor_parallel),
            "the engine reference does not split a model",
            "set it to 1, or use engine: vllm",
        )
    for name, value in inference.engine_args.items():
        if name != "max-model-len":
            yield Problem(
                f"spec.inference.engineArgs.{name}",
                show(value),
                "the engine reference has no such flag",
                "remove it (max-model-len is the only one), or use engine: vllm",
            )


def _checkpoint(spec: RLTrainingSpec) -> Iterator[Problem]:
    checkpoint = spec.checkpoint
    if checkpoint.storage is not None and checkpoint.claim_name is not None:
        yield Problem(
            "spec.checkpoint",
            None,
            "has both storage (a claim to be made) and claimName (one that exists)",
            "keep one of them",
        )
    if checkpoint.claim_name is not None and checkpoint.on_delete == "Delete":
        yield Problem(
            "spec.checkpoint.onDelete",
            show("Delete"),
            "a claim that the job did not make is not deleted with it",
            "remove onDelete, or give storage instead of claimName",
        )


def _overlays(spec: RLTrainingSpec) -> Iterator[Problem]:
    for name in ("coordinator", "inference", "actors", "trainer"):
        overlay = getattr(spec, name).pod_template
        yield from find_overlay_problems(overlay, f"spec.{name}.podTemplate")


_RULES: Final[tuple[Callable[[RLTrainingSpec], Iterator[Problem]], ...]] = (
    _model,
    _loss,
    _budget,
    _concurrency,
    _staleness,
    _lengths,
    _schedule,
    _trainer,
    _gpus_of_ranks,
    _reference,
    _checkpoint,
    _overlays,
)
