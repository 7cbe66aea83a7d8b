"""One row for each way in which a job file is wrong: what is written, the field that is named, words of the message."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from inflight_runtime.api import JobError, parse_job, validate_job

GOOD: dict[str, Any] = {
    "apiVersion": "inflight.dev/v1alpha1",
    "kind": "RLTrainingJob",
    "metadata": {"name": "sort-letters"},
    "spec": {
        "model": {"source": "./model"},
        "environment": {"entrypoint": "environment:SortLetters"},
        "algorithm": {"steps": 100, "promptsPerStep": 16, "groupSize": 8},
        "sampling": {"maxTokens": 6},
    },
}


def merge(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {name: merge(base.get(name), change[name]) if name in change else base[name] for name in {**base, **change}}


def refuse(change: str) -> JobError:
    text = yaml.safe_dump(GOOD)
    fragment = parse_fragment(change)
    with pytest.raises(JobError) as caught:
        validate_job(merge(yaml.safe_load(text), fragment), "job.yaml")
    return caught.value


def parse_fragment(change: str) -> Any:
    from inflight_runtime.api.loading import read_yaml

    return read_yaml(change, "fragment")[0]


UNKNOWN_FIELDS = [
    ("spec: {algorithm: {groupsize: 4}}", "spec.algorithm.groupsize", "did you mean groupSize?"),
    ("spec: {algorithm: {group_size: 4}}", "spec.algorithm.group_size", "did you mean groupSize?"),
    ("spec: {algorithm: {maxStalenes: 4}}", "spec.algorithm.maxStalenes", "did you mean maxStaleness?"),
    ("spec: {groupSize: 4}", "spec.groupSize", "it belongs under spec.algorithm, as groupSize"),
    ("spec: {algorithm: {learning_rate: 1}}", "spec.algorithm.learning_rate", "under spec.trainer.optimizer"),
    ("spec: {algorithm: {zzz: 4}}", "spec.algorithm.zzz", "known here: steps, promptsPerStep"),
    ("spec: {trainer: {optimizer: {lr: 1}}}", "spec.trainer.optimizer.lr", "known here: learningRate"),
    ("extra: 1", "extra", "known here: apiVersion"),
    ("sepc: {}", "sepc", "did you mean spec?"),
    ("metadata: {nmae: x}", "metadata.nmae", "did you mean name?"),
    ("spec: {sampling: {top_p: 1}}", "spec.sampling.top_p", "did you mean topP?"),
    ("spec: {coordinator: {image: x}}", "spec.coordinator.image", "under spec."),
]

WRONG_TYPES = [
    ("spec: {algorithm: {steps: '100'}}", "spec.algorithm.steps", "write it without quotes: 100"),
    ("spec: {algorithm: {steps: 1.5}}", "spec.algorithm.steps", "must be a whole number"),
    ("spec: {algorithm: {steps: 1e2}}", "spec.algorithm.steps", "write 100"),
    ("spec: {algorithm: {steps: true}}", "spec.algorithm.steps", "must be a whole number"),
    ("spec: {algorithm: {steps: }}", "spec.algorithm.steps", "give a value, or remove the line"),
    ("spec: {algorithm: {shuffle: 'yes'}}", "spec.algorithm.shuffle", "must be true or false"),
    ("spec: {algorithm: {shuffle: 'false'}}", "spec.algorithm.shuffle", "write it without quotes: false"),
    ("spec: {suspend: 1}", "spec.suspend", "must be true or false"),
    ("spec: {sampling: {temperature: hot}}", "spec.sampling.temperature", "must be a number"),
    ("spec: {sampling: {temperature: .nan}}", "spec.sampling.temperature", "must be a finite number"),
    ("spec: {sampling: {stop: END}}", "spec.sampling.stop", 'write it as a list: ["END"]'),
    ("spec: {sampling: {stop: [1]}}", "spec.sampling.stop[0]", 'write it in quotes: "1"'),
    ("spec: {sampling: []}", "spec.sampling", "must be a map of fields"),
    ("spec: {model: ./model}", "spec.model", "must be a map of fields"),
    ("spec: {trainer: {optimizer: {betas: [0.9, x]}}}", "spec.trainer.optimizer.betas[1]", "must be a number"),
    ("spec: {environment: {args: [1]}}", "spec.environment.args", "must be a map of fields"),
    ("spec: {environment: {args: {1: x}}}", "spec.environment.args", 'write it in quotes: "1"'),
    ("spec: {environment: {args: {a: {b: .inf}}}}", "spec.environment.args", "inf at a.b"),
    ("spec: {1: x}", "spec[1]", "the key must be text"),
    ("metadata: {labels: {a: 1}}", "metadata.labels.a", 'write it in quotes: "1"'),
    ("metadata: {labels: {1: a}}", "metadata.labels[1]", "the key must be text"),
]

OUT_OF_BOUNDS = [
    ("spec: {algorithm: {steps: 0}}", "spec.algorithm.steps", "at least 1"),
    ("spec: {algorithm: {groupSize: 1}}", "spec.algorithm.groupSize", "at least 2"),
    ("spec: {algorithm: {promptsPerStep: -1}}", "spec.algorithm.promptsPerStep", "at least 1"),
    ("spec: {algorithm: {maxStaleness: -1}}", "spec.algorithm.maxStaleness", "at least 0"),
    ("spec: {algorithm: {seed: 2147483648}}", "spec.algorithm.seed", "at most 2147483647"),
    ("spec: {sampling: {temperature: 0}}", "spec.sampling.temperature", "above 0"),
    ("spec: {sampling: {maxTokens: 0}}", "spec.sampling.maxTokens", "at least 1"),
    ("spec: {sampling: {stop: ['']}}", "spec.sampling.stop[0]", "is empty"),
    ("spec: {trainer: {optimizer: {betas: [0.9, 1.0]}}}", "spec.trainer.optimizer.betas[1]", "below 1"),
    ("spec: {trainer: {optimizer: {betas: [0.9]}}}", "spec.trainer.optimizer.betas", "fewer than 2 entries"),
    ("spec: {trainer: {optimizer: {betas: [0, 0, 0]}}}", "spec.trainer.optimizer.betas", "longer than 2 entries"),
    ("spec: {trainer: {optimizer: {learningRate: 0}}}", "spec.trainer.optimizer.learningRate", "above 0"),
    ("spec: {trainer: {optimizer: {gradClipNorm: 0}}}", "spec.trainer.optimizer.gradClipNorm", "above 0"),
    ("spec: {algorithm: {loss: {isCap: -1}}}", "spec.algorithm.loss.isCap", "above 0"),
    ("spec: {evaluation: {everySteps: 0, prompts: 1}}", "spec.evaluation.everySteps", "at least 1"),
    ("spec: {evaluation: {everySteps: 1, prompts: 1, attempts: 0}}", "spec.evaluation.attempts", "at least 1"),
    ("spec: {checkpoint: {keep: 0}}", "spec.checkpoint.keep", "at least 1"),
    ("spec: {inference: {replicas: -1}}", "spec.inference.replicas", "at least 0"),
    ("spec: {weightSync: {deadlineSeconds: 0}}", "spec.weightSync.deadlineSeconds", "at least 1"),
]

NOT_IN_THE_SET = [
    ("spec: {inference: {engine: vlm}}", "spec.inference.engine", "did you mean vllm?"),
    ("spec: {inference: {engine: sglang}}", "spec.inference.engine", "must be vllm or reference"),
    ("spec: {trainer: {engine: fsdp2}}", "spec.trainer.engine", "write single"),
    ("spec: {trainer: {precision: bfloat16}}", "spec.trainer.precision", "must be float32"),
    ("spec: {weightSync: {transport: http}}", "spec.weightSync.transport", "must be auto, gloo or nccl"),
    ("spec: {algorithm: {loss: {kind: grpo}}}", "spec.algorithm.loss.kind", "must be reinforce_tis or ppo"),
    ("spec: {algorithm: {overAge: Drop}}", "spec.algorithm.overAge", "did you mean drop?"),
    ("spec: {algorithm: {zeroVariance: 1}}", "spec.algorithm.zeroVariance", "must be keep, drop or refill"),
    ("spec: {model: {dtype: float16}}", "spec.model.dtype", "must be float32 or bfloat16"),
    ("spec: {checkpoint: {onDelete: retain}}", "spec.checkpoint.onDelete", "did you mean Retain?"),
    ("apiVersion: inflight.dev/v1", "apiVersion", "did you mean inflight.dev/v1alpha1?"),
]

BADLY_WRITTEN = [
    ("metadata: {name: Sort}", "metadata.name", "RFC 1035"),
    ("metadata: {name: 1sort}", "metadata.name", "RFC 1035"),
    ("metadata: {name: sort-}", "metadata.name", "RFC 1035"),
    ("metadata: {name: so_rt}", "metadata.name", "RFC 1035"),
    ("metadata: {name: ''}", "metadata.name", "is empty"),
    (f"metadata: {{name: {'a' * 41}}}", "metadata.name", "longer than 40 characters"),
    ("spec: {environment: {entrypoint: sort_letters}}", "spec.environment.entrypoint", "for instance environment:Sort"),
    ("spec: {environment: {entrypoint: 'a b:C'}}", "spec.environment.entrypoint", "package.module:Class"),
    ("spec: {environment: {entrypoint: 'env.py:C:D'}}", "spec.environment.entrypoint", "package.module:Class"),
    ("spec: {trainer: {resources: {limits: {memory: 16 GB}}}}", "spec.trainer.resources.limits.memory", '"16Gi"'),
    ("spec: {coordinator: {storage: {size: big}}}", "spec.coordinator.storage.size", "quantity"),
    ("spec: {actors: {resources: {limits: {cpu: 0.5}}}}", "spec.actors.resources.limits.cpu", 'in quotes: "0.5"'),
    ("spec: {trainer: {image: 'a b'}}", "spec.trainer.image", "Container image"),
    ("spec: {inference: {podTemplate: {containers: []}}}", "spec.inference.podTemplate", "spec.containers"),
    (
        "spec: {model: {source: null, volume: {claimName: m, subPath: ../x}}}",
        "spec.model.volume.subPath",
        'without ".."',
    ),
]

ENGINE_ARGS = [
    ("spec: {inference: {engineArgs: {model: x}}}", "model is set by the run itself", "spec.model.source"),
    ("spec: {inference: {engineArgs: {--port: 1}}}", "set by the run itself", "addresses"),
    ("spec: {inference: {engineArgs: {max_num_seqs: 4}}}", "set by the run itself", "spec.inference.maxConcurrent"),
    ("spec: {inference: {engineArgs: {no-enable-lora: true}}}", "set by the run itself", "whole model"),
    ("spec: {inference: {engineArgs: {speculative-config.model: x}}}", "set by the run itself", "draft"),
    ("spec: {inference: {engineArgs: {maxNumBatchedTokens: 4}}}", "not spelt", "write max-num-batched-tokens"),
    ("spec: {inference: {engineArgs: {--block-size: 32}}}", "not spelt", "write block-size"),
    ("spec: {inference: {engineArgs: {block-size: }}}", "has no value", "true for a bare flag"),
    ("spec: {inference: {engineArgs: {max-model-len: 4k}}}", "whole number above 0", "plain number"),
    ("spec: {inference: {engineArgs: {max-model-len: true}}}", "whole number above 0", "plain number"),
]

CONTRADICTIONS = [
    ("spec: {sampling: {topP: 0.9}}", "spec.sampling.topP", "importance ratio"),
    ("spec: {sampling: {topK: 50}}", "spec.sampling.topK", "importance ratio"),
    ("spec: {model: {source: null}}", "spec.model", "set spec.model.source"),
    ("spec: {model: {volume: {claimName: m}}}", "spec.model", "keep one of them"),
    ("spec: {model: {revision: main}}", "spec.model.revision", "hub id only"),
    ("spec: {model: {source: null, volume: {claimName: m}, revision: x}}", "spec.model.revision", "hub id only"),
    ("spec: {model: {tokenSecretRef: {name: hf}}}", "spec.model.tokenSecretRef", "hub id only"),
    ("spec: {model: {source: ~/model}}", "spec.model.source", "write the whole path"),
    ("spec: {model: {tokenizer: ~/t}}", "spec.model.tokenizer", "write the whole path"),
    ("spec: {algorithm: {loss: {kind: ppo, isCap: 2}}}", "spec.algorithm.loss.isCap", "no meaning with kind ppo"),
    ("spec: {algorithm: {loss: {clipLow: 0.2}}}", "spec.algorithm.loss.clipLow", "see isCap"),
    ("spec: {algorithm: {loss: {clipHigh: 0.2}}}", "spec.algorithm.loss.clipHigh", "see isCap"),
    ("spec: {trainer: {microBatchTokens: 48}}", "spec.trainer.microBatchTokens", "one group: 8 attempts of up to 6"),
    (
        "spec: {sampling: {maxTokens: 9000}, trainer: {microBatchTokens: 8192}}",
        "spec.trainer.microBatchTokens",
        "one attempt of up to 9000",
    ),
    ("spec: {weightSync: {intervalSteps: 6}}", "spec.weightSync.intervalSteps", "set it to 5 or less"),
    (
        "spec: {algorithm: {maxStaleness: 0}, weightSync: {intervalSteps: 2}}",
        "spec.weightSync.intervalSteps",
        "raise maxStaleness to 1",
    ),
    (
        "spec: {inference: {engineArgs: {max-model-len: 6}}}",
        "spec.sampling.maxTokens",
        "no room for a prompt",
    ),
    ("spec: {inference: {replicas: 2, maxConcurrent: 4}}", "spec.inference.maxConcurrent", "given out whole"),
    ("spec: {trainer: {optimizer: {warmupSteps: 100}}}", "spec.trainer.optimizer.warmupSteps", "set it below 100"),
    ("spec: {evaluation: {everySteps: 101, prompts: 1}}", "spec.evaluation.everySteps", "nothing would be evaluated"),
    ("spec: {trainer: {nodes: 2}}", "spec.trainer.nodes", "set it to 1"),
    ("spec: {trainer: {processesPerNode: 2}}", "spec.trainer.processesPerNode", "set it to 1"),
    ("spec: {inference: {engine: reference, tensorParallel: 2}}", "spec.inference.tensorParallel", "engine: vllm"),
    (
        "spec: {inference: {engine: reference, engineArgs: {block-size: 32}}}",
        "spec.inference.engineArgs.block-size",
        "no such flag",
    ),
    ("spec: {checkpoint: {storage: {size: 1Gi}, claimName: c}}", "spec.checkpoint", "keep one of them"),
    ("spec: {checkpoint: {claimName: c, onDelete: Delete}}", "spec.checkpoint.onDelete", "remove onDelete"),
]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [*UNKNOWN_FIELDS, *WRONG_TYPES, *OUT_OF_BOUNDS, *NOT_IN_THE_SET, *BADLY_WRITTEN, *CONTRADICTIONS],
)
def test_a_wrong_field_is_named_with_its_remedy(change: str, field: str, words: str) -> None:
    error = refuse(change)
    assert [problem.field for problem in error.problems] == [field]
    assert words in str(error)
    assert error.problems[0].reason
    assert error.problems[0].remedy


@pytest.mark.parametrize(("change", "reason", "remedy"), ENGINE_ARGS)
def test_an_engine_flag_that_cannot_be_taken_is_named(change: str, reason: str, remedy: str) -> None:
    (problem,) = refuse(change).problems
    assert problem.field == "spec.inference.engineArgs"
    assert reason in problem.reason
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        (("spec",), "spec", "What is wanted"),
        (("metadata", "name"), "metadata.name", "Name of the job"),
        (("apiVersion",), "apiVersion", "Always `inflight.dev/v1alpha1`"),
        (("spec", "algorithm", "steps"), "spec.algorithm.steps", "Optimizer steps of the whole run"),
        (("spec", "environment"), "spec.environment", "Prompts, rollouts and rewards"),
    ],
)
def test_a_missing_field_is_explained(path: tuple[str, ...], field: str, words: str) -> None:
    job = copy.deepcopy(GOOD)
    node = job
    for name in path[:-1]:
        node = node[name]
    del node[path[-1]]
    with pytest.raises(JobError) as caught:
        validate_job(job, "job.yaml")
    (problem,) = caught.value.problems
    assert (problem.field, problem.reason, problem.value) == (field, "is required", None)
    assert words in problem.remedy


@pytest.mark.parametrize(
    "change",
    [
        "spec: {sampling: {topP: 1, topK: -1}}",
        "spec: {sampling: {topP: 1.0, topK: 0}}",
        "spec: {algorithm: {loss: {isCap: null}}}",
        "spec: {algorithm: {loss: {kind: ppo, clipLow: 0.1, clipHigh: 0.28}}}",
        "spec: {trainer: {microBatchTokens: 49}}",
        "spec: {sampling: {maxTokens: 2048}, trainer: {microBatchTokens: 4096}}",
        "spec: {weightSync: {intervalSteps: 5}}",
        "spec: {trainer: {optimizer: {warmupSteps: 99}}}",
        "spec: {inference: {engineArgs: {max-model-len: 7, compilation-config.level: 0}}}",
        "spec: {inference: {engine: reference, engineArgs: {max-model-len: 64}}}",
        "spec: {model: {source: Qwen/Qwen2.5-0.5B-Instruct, revision: main, tokenSecretRef: {name: hf}}}",
        "spec: {evaluation: {everySteps: 100, prompts: 8}}",
        "spec: {inference: {replicas: 0}}",
        "spec: {trainer: {resources: {limits: {cpu: 2, memory: 16Gi, nvidia.com/gpu: 1}}}}",
        "spec: {trainer: {podTemplate: {spec: {nodeSelector: {a: b}}}}}",
        f"metadata: {{name: {'a' * 40}}}",
        "metadata: {creationTimestamp: null, labels: {kueue.x-k8s.io/queue-name: q}}",
    ],
)
def test_a_valid_neighbour_is_accepted(change: str) -> None:
    validate_job(merge(GOOD, parse_fragment(change)), "job.yaml")


def test_all_problems_are_told_at_once_with_their_lines() -> None:
    text = (
        yaml.safe_dump(GOOD, sort_keys=False).replace("groupSize: 8", "groupsize: 8").replace("steps: 100", "steps: -1")
    )
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "job.yaml: 2 problems"
    numbers = [text[: text.index(word)].count("\n") + 1 for word in ("steps:", "groupsize:")]
    assert lines[1].startswith(f"  line {numbers[0]}: spec.algorithm.steps: must be at least 1 (got -1); ")
    assert lines[2] == f"  line {numbers[1]}: spec.algorithm.groupsize: unknown field (got 8); did you mean groupSize?"


def test_contradictions_are_told_together_with_their_lines() -> None:
    text = yaml.safe_dump(merge(GOOD, {"spec": {"trainer": {"nodes": 2, "microBatchTokens": 1}}}), sort_keys=False)
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    found = {problem.field: problem.line for problem in caught.value.problems}
    assert found == {
        "spec.trainer.nodes": text[: text.index("nodes:")].count("\n") + 1,
        "spec.trainer.microBatchTokens": text[: text.index("microBatchTokens:")].count("\n") + 1,
    }


def test_a_long_value_is_shortened() -> None:
    error = refuse(f"spec: {{algorithm: {{overAge: {'x' * 500}}}}}")
    assert len(str(error)) < 300
    assert "..." in str(error)


def test_another_kind_of_object_is_not_picked_apart() -> None:
    with pytest.raises(JobError) as caught:
        validate_job({"apiVersion": "v1", "kind": "ConfigMap", "data": {}}, "job.yaml")
    assert (
        str(caught.value)
        == 'job.yaml: kind: must be RLTrainingJob (got "ConfigMap"); give the file of an RLTrainingJob'
    )
