"""Wrong jobs, one a row: what is written, what ``inflight validate`` says of it, and what the API server says.

The API server names the field and shows: of an unknown field only its name; of a value of the wrong type that type; of
a value out of bounds, of a set or of a pattern the value itself, unless it is too long; of what a CEL rule refuses what
the rule's message shows, which here is the value, if it is one, and the remedy. Unknown fields hide all else that is
wrong with a job, wrong types hide what rules would say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from inflight_runtime.api.loading import read_yaml

GOOD: Final[dict[str, Any]] = {
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


@dataclass(frozen=True, slots=True)
class Bad:
    """One way in which a job is wrong.

    Attributes:
        change: YAML that is laid over :data:`GOOD`.
        field: the field that ``inflight validate`` names.
        words: words of its message.
        told: words of the API server's message; where there are none, that the field is unknown.
        at: the field that the API server names, where it is another one; ``-`` where it names none.
        remedy: more words of the message of ``inflight validate``.
        unknowable: why the API server cannot know, and accepts it; the operator refuses it with ``Validated=False``.
    """

    change: str
    field: str
    words: str
    told: str = ""
    at: str = ""
    remedy: str = ""
    unknowable: str = ""

    def __post_init__(self) -> None:
        if not self.told and not self.unknowable:
            object.__setattr__(self, "told", f'unknown field "{self.at or self.field}"')

    def __str__(self) -> str:
        return self.change if len(self.change) <= 100 else f"{self.change[:97]}..."

    @property
    def job(self) -> dict[str, Any]:
        """The whole job."""
        return changed(self.change)


def changed(change: str) -> dict[str, Any]:
    """:data:`GOOD` with a YAML fragment laid over it."""
    merged: dict[str, Any] = merge(GOOD, read_yaml(change, "fragment")[0])
    return merged


def merge(base: Any, change: Any) -> Any:
    """``change`` laid over ``base``, map by map."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {name: merge(base.get(name), change[name]) if name in change else base[name] for name in {**base, **change}}


ENGINE = "spec.inference.engineArgs"
ACTORS = "spec.actors.podTemplate"

UNKNOWN_FIELDS: Final = [
    Bad("spec: {algorithm: {groupsize: 4}}", "spec.algorithm.groupsize", "did you mean groupSize?"),
    Bad("spec: {algorithm: {group_size: 4}}", "spec.algorithm.group_size", "did you mean groupSize?"),
    Bad("spec: {algorithm: {maxStalenes: 4}}", "spec.algorithm.maxStalenes", "did you mean maxStaleness?"),
    Bad("spec: {groupSize: 4}", "spec.groupSize", "it belongs under spec.algorithm, as groupSize"),
    Bad("spec: {algorithm: {learning_rate: 1}}", "spec.algorithm.learning_rate", "under spec.trainer.optimizer"),
    Bad("spec: {algorithm: {zzz: 4}}", "spec.algorithm.zzz", "known here: steps, promptsPerStep"),
    Bad("spec: {trainer: {optimizer: {lr: 1}}}", "spec.trainer.optimizer.lr", "known here: learningRate"),
    Bad("extra: 1", "extra", "known here: apiVersion"),
    Bad("sepc: {}", "sepc", "did you mean spec?"),
    Bad("metadata: {nmae: x}", "metadata.nmae", "did you mean name?"),
    Bad("spec: {sampling: {top_p: 1}}", "spec.sampling.top_p", "did you mean topP?"),
    Bad("spec: {coordinator: {image: x}}", "spec.coordinator.image", "under spec."),
]
WRONG_TYPES: Final = [
    Bad(
        "spec: {algorithm: {steps: '100'}}",
        "spec.algorithm.steps",
        "write it without quotes: 100",
        'must be of type integer: "string"',
    ),
    Bad(
        "spec: {algorithm: {steps: 1.5}}",
        "spec.algorithm.steps",
        "must be a whole number",
        'must be of type integer: "number"',
    ),
    Bad("spec: {algorithm: {steps: 1e2}}", "spec.algorithm.steps", "write 100", "expected int, got float64", at="spec"),
    Bad(
        "spec: {algorithm: {steps: true}}",
        "spec.algorithm.steps",
        "must be a whole number",
        'must be of type integer: "boolean"',
    ),
    Bad("spec: {algorithm: {steps: }}", "spec.algorithm.steps", "give a value, or remove the line", "Required value"),
    Bad(
        "spec: {algorithm: {shuffle: 'yes'}}",
        "spec.algorithm.shuffle",
        "must be true or false",
        'must be of type boolean: "string"',
    ),
    Bad(
        "spec: {algorithm: {shuffle: 'false'}}",
        "spec.algorithm.shuffle",
        "write it without quotes: false",
        'must be of type boolean: "string"',
    ),
    Bad("spec: {suspend: 1}", "spec.suspend", "must be true or false", 'must be of type boolean: "integer"'),
    Bad(
        "spec: {sampling: {temperature: hot}}",
        "spec.sampling.temperature",
        "must be a number",
        'must be of type number: "string"',
    ),
    Bad(
        "spec: {sampling: {temperature: .nan}}",
        "spec.sampling.temperature",
        "must be a finite number",
        "json parse error: invalid character 'N'",
        at="-",
    ),
    Bad(
        "spec: {sampling: {stop: END}}",
        "spec.sampling.stop",
        'write it as a list: ["END"]',
        'must be of type array: "string"',
    ),
    Bad(
        "spec: {sampling: {stop: [1]}}",
        "spec.sampling.stop[0]",
        'write it in quotes: "1"',
        'must be of type string: "integer"',
    ),
    Bad("spec: {sampling: []}", "spec.sampling", "must be a map of fields", 'must be of type object: "array"'),
    Bad("spec: {model: ./model}", "spec.model", "must be a map of fields", 'must be of type object: "string"'),
    Bad(
        "spec: {trainer: {optimizer: {betas: [0.9, x]}}}",
        "spec.trainer.optimizer.betas[1]",
        "must be a number",
        'must be of type number: "string"',
    ),
    Bad(
        "spec: {environment: {args: [1]}}",
        "spec.environment.args",
        "must be a map of fields",
        'must be of type object: "array"',
    ),
    Bad(
        "spec: {environment: {args: {1: x}}}",
        "spec.environment.args",
        'write it in quotes: "1"',
        unknowable='JSON has only text keys: it arrives as "1"',
    ),
    Bad(
        "spec: {environment: {args: {a: {b: .inf}}}}",
        "spec.environment.args",
        "inf at a.b",
        "json parse error: invalid character 'I'",
        at="-",
    ),
    Bad("spec: {1: x}", "spec[1]", "the key must be text", at="spec.1"),
    Bad(
        "metadata: {labels: {a: 1}}",
        "metadata.labels.a",
        'write it in quotes: "1"',
        "cannot unmarshal number into Go struct field ObjectMeta.labels",
        at="ObjectMeta.labels",
    ),
    Bad(
        "metadata: {labels: {1: a}}",
        "metadata.labels[1]",
        "the key must be text",
        unknowable='JSON has only text keys: it arrives as "1"',
    ),
]
OUT_OF_BOUNDS: Final = [
    Bad("spec: {algorithm: {steps: 0}}", "spec.algorithm.steps", "at least 1", "Invalid value: 0"),
    Bad("spec: {algorithm: {groupSize: 1}}", "spec.algorithm.groupSize", "at least 2", "Invalid value: 1"),
    Bad("spec: {algorithm: {promptsPerStep: -1}}", "spec.algorithm.promptsPerStep", "at least 1", "Invalid value: -1"),
    Bad("spec: {algorithm: {maxStaleness: -1}}", "spec.algorithm.maxStaleness", "at least 0", "Invalid value: -1"),
    Bad(
        "spec: {algorithm: {seed: 2147483648}}",
        "spec.algorithm.seed",
        "at most 2147483647",
        "Invalid value: 2147483648",
    ),
    Bad("spec: {sampling: {temperature: 0}}", "spec.sampling.temperature", "above 0", "Invalid value: 0"),
    Bad("spec: {sampling: {maxTokens: 0}}", "spec.sampling.maxTokens", "at least 1", "Invalid value: 0"),
    Bad("spec: {sampling: {stop: ['']}}", "spec.sampling.stop[0]", "is empty", 'Invalid value: ""'),
    Bad(
        "spec: {trainer: {optimizer: {betas: [0.9, 1.0]}}}",
        "spec.trainer.optimizer.betas[1]",
        "below 1",
        "Invalid value: 1",
    ),
    Bad(
        "spec: {trainer: {optimizer: {betas: [0.9]}}}",
        "spec.trainer.optimizer.betas",
        "fewer than 2 entries",
        "Invalid value: 1",
    ),
    Bad(
        "spec: {trainer: {optimizer: {betas: [0, 0, 0]}}}",
        "spec.trainer.optimizer.betas",
        "longer than 2 entries",
        "Too many: 3: must have at most 2 items",
    ),
    Bad(
        "spec: {trainer: {optimizer: {learningRate: 0}}}",
        "spec.trainer.optimizer.learningRate",
        "above 0",
        "Invalid value: 0",
    ),
    Bad(
        "spec: {trainer: {optimizer: {gradClipNorm: -1}}}",
        "spec.trainer.optimizer.gradClipNorm",
        "at least 0",
        "Invalid value: -1",
    ),
    Bad("spec: {algorithm: {loss: {isCap: -1}}}", "spec.algorithm.loss.isCap", "at least 0", "Invalid value: -1"),
    Bad(
        "spec: {evaluation: {everySteps: 0, prompts: 1}}",
        "spec.evaluation.everySteps",
        "at least 1",
        "Invalid value: 0",
    ),
    Bad(
        "spec: {evaluation: {everySteps: 1, prompts: 1, attempts: 0}}",
        "spec.evaluation.attempts",
        "at least 1",
        "Invalid value: 0",
    ),
    Bad("spec: {checkpoint: {keep: 0}}", "spec.checkpoint.keep", "at least 1", "Invalid value: 0"),
    Bad("spec: {inference: {replicas: -1}}", "spec.inference.replicas", "at least 0", "Invalid value: -1"),
    Bad(
        "spec: {weightSync: {deadlineSeconds: 0}}", "spec.weightSync.deadlineSeconds", "at least 1", "Invalid value: 0"
    ),
]
NOT_IN_THE_SET: Final = [
    Bad(
        "spec: {inference: {engine: vlm}}",
        "spec.inference.engine",
        "did you mean vllm?",
        'Unsupported value: "vlm": supported values: "vllm", "reference"',
    ),
    Bad(
        "spec: {inference: {engine: sglang}}",
        "spec.inference.engine",
        "must be vllm or reference",
        'Unsupported value: "sglang": supported values: "vllm", "reference"',
    ),
    Bad(
        "spec: {trainer: {engine: fsdp}}",
        "spec.trainer.engine",
        "did you mean fsdp2?",
        'Unsupported value: "fsdp": supported values: "single", "fsdp2", "deepspeed"',
    ),
    Bad(
        "spec: {trainer: {precision: float16}}",
        "spec.trainer.precision",
        "must be auto, float32 or bfloat16",
        'Unsupported value: "float16": supported values: "auto", "float32", "bfloat16"',
    ),
    Bad(
        "spec: {weightSync: {transport: http}}",
        "spec.weightSync.transport",
        "must be auto, gloo or nccl",
        'Unsupported value: "http": supported values: "auto", "gloo", "nccl"',
    ),
    Bad(
        "spec: {algorithm: {loss: {kind: grpo}}}",
        "spec.algorithm.loss.kind",
        "must be reinforce_tis or ppo",
        'Unsupported value: "grpo": supported values: "reinforce_tis", "ppo"',
    ),
    Bad(
        "spec: {algorithm: {overAge: Drop}}",
        "spec.algorithm.overAge",
        "did you mean drop?",
        'Unsupported value: "Drop": supported values: "keep", "mask", "drop"',
    ),
    Bad(
        "spec: {algorithm: {zeroVariance: 1}}",
        "spec.algorithm.zeroVariance",
        "must be keep, drop or refill",
        'Unsupported value: 1: supported values: "keep", "drop", "refill"',
    ),
    Bad(
        "spec: {model: {dtype: float16}}",
        "spec.model.dtype",
        "must be auto, float32 or bfloat16",
        'Unsupported value: "float16": supported values: "auto", "float32", "bfloat16"',
    ),
    Bad(
        "spec: {checkpoint: {onDelete: retain}}",
        "spec.checkpoint.onDelete",
        "did you mean Retain?",
        'Unsupported value: "retain": supported values: "Retain", "Delete"',
    ),
    Bad(
        "apiVersion: inflight.dev/v1",
        "apiVersion",
        "did you mean inflight.dev/v1alpha1?",
        'in version "v1" cannot be handled',
        at="-",
    ),
]
BADLY_WRITTEN: Final = [
    Bad("metadata: {name: Sort}", "metadata.name", "RFC 1035", 'Invalid value: "Sort"'),
    Bad("metadata: {name: 1sort}", "metadata.name", "RFC 1035", "(got 1sort); rename the job"),
    Bad("metadata: {name: sort-}", "metadata.name", "RFC 1035", 'Invalid value: "sort-"'),
    Bad("metadata: {name: so_rt}", "metadata.name", "RFC 1035", 'Invalid value: "so_rt"'),
    Bad("metadata: {name: ''}", "metadata.name", "is empty", "Required value: name or generateName is required"),
    Bad(
        f"metadata: {{name: {'a' * 41}}}",
        "metadata.name",
        "longer than 40 characters",
        "(got aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa); rename the job",
    ),
    Bad(
        "spec: {environment: {entrypoint: sort_letters}}",
        "spec.environment.entrypoint",
        "for instance environment:Sort",
        'Invalid value: "sort_letters"',
    ),
    Bad(
        "spec: {environment: {entrypoint: 'a b:C'}}",
        "spec.environment.entrypoint",
        "package.module:Class",
        'Invalid value: "a b:C"',
    ),
    Bad(
        "spec: {environment: {entrypoint: 'env.py:C:D'}}",
        "spec.environment.entrypoint",
        "package.module:Class",
        'Invalid value: "env.py:C:D"',
    ),
    Bad(
        "spec: {trainer: {resources: {limits: {memory: 16 GB}}}}",
        "spec.trainer.resources.limits.memory",
        '"16Gi"',
        'Invalid value: "16 GB"',
    ),
    Bad(
        "spec: {coordinator: {storage: {size: big}}}",
        "spec.coordinator.storage.size",
        "quantity",
        'Invalid value: "big"',
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: 0.5}}}}",
        "spec.actors.resources.limits.cpu",
        'in quotes: "0.5"',
        'must be of type integer,string: "number"',
    ),
    Bad("spec: {trainer: {image: 'a b'}}", "spec.trainer.image", "Container image", 'Invalid value: "a b"'),
    Bad(
        "spec: {inference: {podTemplate: {containers: []}}}",
        "spec.inference.podTemplate",
        "spec.containers",
        "containers and all else belong under podTemplate.spec",
    ),
    Bad(
        "spec: {model: {source: null, volume: {claimName: m, subPath: ../x}}}",
        "spec.model.volume.subPath",
        'without ".."',
        '(got ../x); write it without a leading "/" and without ".."',
    ),
]
CONTRADICTIONS: Final = [
    Bad(
        "spec: {sampling: {topP: 0.9}}",
        "spec.sampling.topP",
        "importance ratio",
        "(got 0.9); remove topP and use temperature",
    ),
    Bad(
        "spec: {sampling: {topK: 50}}",
        "spec.sampling.topK",
        "importance ratio",
        "(got 50); remove topK and use temperature",
    ),
    Bad(
        "spec: {model: {source: null}}",
        "spec.model",
        "set spec.model.source",
        "set source (a directory or a hub id) or volume (a claim)",
    ),
    Bad("spec: {model: {volume: {claimName: m}}}", "spec.model", "keep one of them", "keep one of them"),
    Bad(
        "spec: {model: {revision: main}}",
        "spec.model.revision",
        "hub id only",
        "(got main); remove it, or give a hub id as spec.model.source",
    ),
    Bad(
        "spec: {model: {source: null, volume: {claimName: m}, revision: x}}",
        "spec.model.revision",
        "hub id only",
        "(got x); remove it, or give a hub id as spec.model.source",
    ),
    Bad(
        "spec: {model: {tokenSecretRef: {name: hf}}}",
        "spec.model.tokenSecretRef",
        "hub id only",
        "(got hf); remove it, or give a hub id as spec.model.source",
    ),
    Bad(
        "spec: {model: {source: ~/model}}",
        "spec.model.source",
        "write the whole path",
        "(got ~/model); write the whole path",
    ),
    Bad(
        "spec: {model: {tokenizer: ~/t}}",
        "spec.model.tokenizer",
        "write the whole path",
        "(got ~/t); write the whole path",
    ),
    Bad(
        "spec: {algorithm: {loss: {kind: ppo, isCap: 2}}}",
        "spec.algorithm.loss.isCap",
        "no meaning with kind ppo",
        "(got 2); remove it, or set kind: reinforce_tis",
    ),
    Bad(
        "spec: {algorithm: {loss: {clipLow: 0.2}}}",
        "spec.algorithm.loss.clipLow",
        "see isCap",
        "(got 0.2); remove it (see isCap), or set kind: ppo",
    ),
    Bad(
        "spec: {algorithm: {loss: {clipHigh: 0.2}}}",
        "spec.algorithm.loss.clipHigh",
        "see isCap",
        "(got 0.2); remove it (see isCap), or set kind: ppo",
    ),
    Bad(
        "spec: {trainer: {microBatchTokens: 48}}",
        "spec.trainer.microBatchTokens",
        "one group: 8 attempts of up to 6",
        "(got 48); raise it to groupSize x maxTokens and the length of your",
    ),
    Bad(
        "spec: {sampling: {maxTokens: 9000}, trainer: {microBatchTokens: 8192}}",
        "spec.trainer.microBatchTokens",
        "one attempt of up to 9000",
        "(got 8192); raise it to groupSize x maxTokens and the length of your",
    ),
    Bad(
        "spec: {weightSync: {intervalSteps: 6}}",
        "spec.weightSync.intervalSteps",
        "set it to 5 or less",
        "(got 6); set it to maxStaleness + 1 or less, or raise maxStaleness",
    ),
    Bad(
        "spec: {algorithm: {maxStaleness: 0}, weightSync: {intervalSteps: 2}}",
        "spec.weightSync.intervalSteps",
        "raise maxStaleness to 1",
        "(got 2); set it to maxStaleness + 1 or less, or raise maxStaleness",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: 6}}}",
        "spec.sampling.maxTokens",
        "no room for a prompt",
        "(got 6); set it below max-model-len, or raise that",
    ),
    Bad(
        "spec: {inference: {replicas: 2, maxConcurrent: 4}}",
        "spec.inference.maxConcurrent",
        "given out whole",
        "(got 4); set it to spec.algorithm.groupSize or more",
    ),
    Bad(
        "spec: {trainer: {optimizer: {warmupSteps: 100}}}",
        "spec.trainer.optimizer.warmupSteps",
        "set it below 100",
        "(got 100); set it below spec.algorithm.steps",
    ),
    Bad(
        "spec: {evaluation: {everySteps: 101, prompts: 1}}",
        "spec.evaluation.everySteps",
        "nothing would be evaluated",
        "(got 101); set it to spec.algorithm.steps or less, or remove",
    ),
    Bad("spec: {trainer: {nodes: 2}}", "spec.trainer.nodes", "set it to 1", "(got 2); set it to 1"),
    Bad(
        "spec: {trainer: {processesPerNode: 2}}", "spec.trainer.processesPerNode", "set it to 1", "(got 2); set it to 1"
    ),
    Bad(
        "spec: {trainer: {engine: fsdp2, zeroStage: 3}}",
        "spec.trainer.zeroStage",
        "the engine fsdp2 has no such option",
        "(got 3); remove it, or set spec.trainer.engine to deepspeed",
    ),
    Bad(
        "spec: {trainer: {offloadOptimizer: true}}",
        "spec.trainer.offloadOptimizer",
        "set spec.trainer.engine to fsdp2 or deepspeed",
        "(got true); remove it, or set spec.trainer.engine to fsdp2 or deepspeed",
    ),
    Bad(
        "spec: {algorithm: {promptsPerStep: 1}, trainer: {engine: fsdp2, nodes: 2, processesPerNode: 8}}",
        "spec.trainer.processesPerNode",
        "there would be 16 ranks",
        "(got 8); lower nodes x processesPerNode",
        remedy="to 8 or less",
    ),
    Bad(
        "spec: {trainer: {engine: fsdp2, processesPerNode: 8, resources: {limits: {nvidia.com/gpu: 4}}}}",
        "spec.trainer.processesPerNode",
        "a GPU of its own",
        unknowable="an amount in a free-form map",
        remedy="set it to 4 or less",
    ),
    Bad(
        "spec: {inference: {engine: reference, tensorParallel: 2}}",
        "spec.inference.tensorParallel",
        "engine: vllm",
        "(got 2); set it to 1, or use engine: vllm",
    ),
    Bad(
        "spec: {inference: {engine: reference, engineArgs: {block-size: 32}}}",
        "spec.inference.engineArgs.block-size",
        "no such flag",
        "remove all others, or use engine: vllm",
        at="spec.inference.engineArgs",
    ),
    Bad(
        "spec: {checkpoint: {storage: {size: 1Gi}, claimName: c}}",
        "spec.checkpoint",
        "keep one of them",
        "keep one of them",
    ),
    Bad(
        "spec: {checkpoint: {claimName: c, onDelete: Delete}}",
        "spec.checkpoint.onDelete",
        "remove onDelete",
        "(got Delete); remove onDelete, or give storage instead of claimName",
    ),
]
ENGINE_ARGS: Final = [
    Bad(
        "spec: {inference: {engineArgs: {model: x}}}",
        ENGINE,
        "model is set by the run itself",
        "(got x); remove it: set spec.model.source",
        at="spec.inference.engineArgs.model",
        remedy="spec.model.source",
    ),
    Bad(
        "spec: {inference: {engineArgs: {--port: 1}}}",
        ENGINE,
        "set by the run itself",
        "(got 1); remove it: addresses are given by the run",
        at="spec.inference.engineArgs.--port",
        remedy="addresses",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max_num_seqs: 4}}}",
        ENGINE,
        "set by the run itself",
        "(got 4); remove it: set spec.inference.maxConcurrent",
        at="spec.inference.engineArgs.max_num_seqs",
        remedy="spec.inference.maxConcurrent",
    ),
    Bad(
        "spec: {inference: {engineArgs: {no-enable-lora: true}}}",
        ENGINE,
        "set by the run itself",
        "(got true); remove it: the whole model is trained and updated",
        at="spec.inference.engineArgs.no-enable-lora",
        remedy="whole model",
    ),
    Bad(
        "spec: {inference: {engineArgs: {speculative-config.model: x}}}",
        ENGINE,
        "set by the run itself",
        unknowable="a part of a flag: endless names",
        remedy="draft",
    ),
    Bad(
        "spec: {inference: {engineArgs: {maxNumBatchedTokens: 4}}}",
        ENGINE,
        "not spelt",
        unknowable="a name of a free-form map",
        remedy="write max-num-batched-tokens",
    ),
    Bad(
        "spec: {inference: {engineArgs: {--block-size: 32}}}",
        ENGINE,
        "not spelt",
        unknowable="a name of a free-form map",
        remedy="write block-size",
    ),
    Bad(
        "spec: {inference: {engineArgs: {block-size: }}}",
        ENGINE,
        "has no value",
        unknowable="a value in a free-form map",
        remedy="true for a bare flag",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: 4k}}}",
        ENGINE,
        "whole number above 0",
        'must be of type integer: "string"',
        at="spec.inference.engineArgs.max-model-len",
        remedy="plain number",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: true}}}",
        ENGINE,
        "whole number above 0",
        'must be of type integer: "boolean"',
        at="spec.inference.engineArgs.max-model-len",
        remedy="plain number",
    ),
]
NOTHING: Final = [
    Bad("spec: ", "spec", "give a value, or remove the line", "Required value"),
    Bad(
        "metadata: ",
        "metadata",
        "give a value, or remove the line",
        "Required value: name or generateName is required",
        at="metadata.name",
    ),
    Bad(
        "metadata: {name: }",
        "metadata.name",
        "give a value, or remove the line",
        "Required value: name or generateName is required",
    ),
    Bad("spec: {model: }", "spec.model", "give a value, or remove the line", "Required value"),
    Bad("spec: {environment: }", "spec.environment", "give a value, or remove the line", "Required value"),
    Bad(
        "spec: {environment: {entrypoint: }}",
        "spec.environment.entrypoint",
        "give a value, or remove the line",
        "Required value",
    ),
    Bad(
        "spec: {environment: {entrypoint: ''}}",
        "spec.environment.entrypoint",
        "package.module:Class",
        'Invalid value: ""',
    ),
    Bad("spec: {model: {source: ''}}", "spec.model.source", "is empty", 'Invalid value: ""'),
    Bad("spec: {checkpoint: {claimName: ''}}", "spec.checkpoint.claimName", "is empty", 'Invalid value: ""'),
    Bad("spec: {trainer: {image: ''}}", "spec.trainer.image", "is empty", 'Invalid value: ""'),
    Bad("spec: {sampling: {stop: [null]}}", "spec.sampling.stop[0]", "must be text", 'must be of type string: "null"'),
    Bad(
        "spec: {trainer: {optimizer: {betas: []}}}",
        "spec.trainer.optimizer.betas",
        "fewer than 2 entries",
        "Invalid value: 0",
    ),
    Bad(
        "spec: {coordinator: {storage: {accessModes: []}}}",
        "spec.coordinator.storage.accessModes",
        "is empty",
        "Invalid value: 0",
    ),
    Bad(
        "spec: {trainer: {resources: {limits: []}}}",
        "spec.trainer.resources.limits",
        "must be a map of fields",
        'must be of type object: "array"',
    ),
    Bad(
        "spec: {trainer: {resources: {limits: {memory: ''}}}}",
        "spec.trainer.resources.limits.memory",
        "quantity",
        'Invalid value: ""',
    ),
    Bad("spec: {evaluation: {everySteps: 1}}", "spec.evaluation.prompts", "is required", "Required value"),
]
NUMBERS: Final = [
    Bad(
        "spec: {algorithm: {steps: 99999999999999999999}}",
        "spec.algorithm.steps",
        "at most 10000000",
        'must be of type integer: "number"',
    ),
    Bad(
        "spec: {algorithm: {seed: -9223372036854775809}}",
        "spec.algorithm.seed",
        "at least 0",
        'must be of type integer: "number"',
    ),
    Bad(
        "spec: {inference: {replicas: 2147483648}}",
        "spec.inference.replicas",
        "at most 1000",
        "Invalid value: 2147483648",
    ),
    Bad("spec: {algorithm: {groupSize: -0}}", "spec.algorithm.groupSize", "at least 2", "Invalid value: 0"),
    Bad("spec: {sampling: {temperature: -0.0}}", "spec.sampling.temperature", "above 0", "Invalid value: -0"),
    Bad(
        "spec: {sampling: {temperature: 1e309}}",
        "spec.sampling.temperature",
        "must be a finite number",
        "json parse error: invalid character 'I'",
        at="-",
    ),
    Bad(
        "spec: {weightSync: {deadlineSeconds: 1e300}}",
        "spec.weightSync.deadlineSeconds",
        "at most 3600",
        "Invalid value: 1e+300",
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: 99999999999999999999}}}}",
        "spec.actors.resources.limits.cpu",
        "too large for a number",
        'must be of type integer,string: "number"',
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: -1}}}}",
        "spec.actors.resources.limits.cpu",
        "quantity",
        "Invalid value: -1",
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: true}}}}",
        "spec.actors.resources.limits.cpu",
        "must be text",
        'must be of type integer,string: "boolean"',
    ),
    Bad(
        "spec: {actors: {resources: {limits: {memory: -1Gi}}}}",
        "spec.actors.resources.limits.memory",
        "quantity",
        'Invalid value: "-1Gi"',
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: 0}}}",
        ENGINE,
        "whole number above 0",
        "Invalid value: 0",
        at="spec.inference.engineArgs.max-model-len",
        remedy="plain number",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: 1.5}}}",
        ENGINE,
        "whole number above 0",
        'must be of type integer: "number"',
        at="spec.inference.engineArgs.max-model-len",
        remedy="plain number",
    ),
    Bad(
        "spec: {inference: {engineArgs: {kv-cache-memory-bytes: 99999999999999999999}}}",
        ENGINE,
        "whole number above 0",
        'must be of type integer: "number"',
        at="spec.inference.engineArgs.kv-cache-memory-bytes",
        remedy="plain number",
    ),
]
TEXTS: Final = [
    Bad("metadata: {name: größe}", "metadata.name", "RFC 1035", 'Invalid value: "größe"'),
    Bad('metadata: {name: "a\\n"}', "metadata.name", "RFC 1035", 'Invalid value: "a\\n"'),
    Bad(
        "spec: {environment: {entrypoint: 'größe:Größe'}}",
        "spec.environment.entrypoint",
        "package.module:Class",
        'Invalid value: "größe:Größe"',
    ),
    Bad(
        'spec: {environment: {entrypoint: "a:B\\n"}}',
        "spec.environment.entrypoint",
        "package.module:Class",
        'Invalid value: "a:B\\n"',
    ),
    Bad(
        "spec: {checkpoint: {claimName: Ä}}",
        "spec.checkpoint.claimName",
        "is not written as it must be",
        'Invalid value: "Ä"',
    ),
    Bad(
        'spec: {checkpoint: {claimName: "c\\n"}}',
        "spec.checkpoint.claimName",
        "is not written as it must be",
        'Invalid value: "c\\n"',
    ),
    Bad(
        'spec: {actors: {resources: {limits: {memory: "16Gi\\n"}}}}',
        "spec.actors.resources.limits.memory",
        "quantity",
        'Invalid value: "16Gi\\n"',
    ),
    Bad('spec: {actors: {image: "a\\u00a0b"}}', "spec.actors.image", "Container image", 'Invalid value: "a\\u00a0b"'),
    Bad(
        f"spec: {{actors: {{image: {'i' * 1025}}}}}",
        "spec.actors.image",
        "longer than 1024 characters",
        "Too long: may not be more than 1024 bytes",
    ),
    Bad(
        f"spec: {{model: {{source: {'/' * 4097}}}}}",
        "spec.model.source",
        "longer than 4096 characters",
        "Too long: may not be more than 4096 bytes",
    ),
    Bad(
        f"spec: {{checkpoint: {{claimName: {'c' * 254}}}}}",
        "spec.checkpoint.claimName",
        "longer than 253 characters",
        "Too long: may not be more than 253 bytes",
    ),
    Bad(
        f"spec: {{sampling: {{stop: [{'ü' * 257}]}}}}",
        "spec.sampling.stop[0]",
        "longer than 256 characters",
        "Too long: may not be more than 256 bytes",
    ),
    Bad(
        f"spec: {{sampling: {{stop: [{', '.join('abcdefghijklmopqr')}]}}}}",
        "spec.sampling.stop",
        "longer than 16 entries",
        "Too many: 17: must have at most 16 items",
    ),
    Bad(
        f"spec: {{actors: {{resources: {{limits: {{{', '.join(f'r{n}: 1' for n in range(65))}}}}}}}}}",
        "spec.actors.resources.limits",
        "longer than 64 entries",
        "Too many: 65: must have at most 64 items",
    ),
    Bad("metadata: {labels: {a b: x}}", "metadata.labels", "'a b'", 'Invalid value: "a b"'),
    Bad("metadata: {labels: {a: x y}}", "metadata.labels", "'x y' at a", 'Invalid value: "x y"'),
    Bad(f"metadata: {{labels: {{a: {'x' * 64}}}}}", "metadata.labels", "no label", "Invalid value:"),
    Bad(
        "metadata: {labels: {Example.com/a: x}}", "metadata.labels", "'Example.com/a'", 'Invalid value: "Example.com/a"'
    ),
    Bad("metadata: {annotations: {/a: x}}", "metadata.annotations", "'/a'", 'Invalid value: "/a"'),
]
OVERLAYS: Final = [
    Bad(
        "spec: {actors: {podTemplate: {tolerations: []}}}",
        "spec.actors.podTemplate",
        "write it as spec.tolerations",
        "containers and all else belong under podTemplate.spec",
    ),
    Bad(
        "spec: {actors: {podTemplate: {$patch: replace, spec: {}}}}",
        "spec.actors.podTemplate",
        "metadata and spec",
        "containers and all else belong under podTemplate.spec",
    ),
    Bad(
        "spec: {actors: {podTemplate: []}}",
        "spec.actors.podTemplate",
        "must be a map of fields",
        'must be of type object: "array"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: []}}}",
        f"{ACTORS}.spec",
        "must be a map of fields",
        'must be of type object: "array"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {metadata: x}}}",
        f"{ACTORS}.metadata",
        "must be a map of fields",
        'must be of type object: "string"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {metadata: {labels: [a]}}}}",
        f"{ACTORS}.metadata.labels",
        "must be a map of fields",
        'must be of type object: "array"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {metadata: {labels: {a: 1}}}}}",
        f"{ACTORS}.metadata.labels.a",
        "must be text",
        'must be of type string: "integer"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {metadata: {labels: {inflight.dev/role: x}}}}}",
        f"{ACTORS}.metadata.labels.inflight.dev/role",
        "choose another name",
        '(got ["inflight.dev/role"]); choose another name',
        at="spec.actors.podTemplate.metadata.labels",
    ),
    Bad(
        "spec: {trainer: {podTemplate: {metadata: {labels: {app.kubernetes.io/instance: x}}}}}",
        "spec.trainer.podTemplate.metadata.labels.app.kubernetes.io/instance",
        "choose another name",
        '(got ["app.kubernetes.io/instance"]); choose another name',
        at="spec.trainer.podTemplate.metadata.labels",
    ),
    Bad(
        "spec: {trainer: {podTemplate: {metadata: {labels: {jobset.sigs.k8s.io/jobset-name: x}}}}}",
        "spec.trainer.podTemplate.metadata.labels.jobset.sigs.k8s.io/jobset-name",
        "choose another name",
        '(got ["jobset.sigs.k8s.io/jobset-name"]); choose another name',
        at="spec.trainer.podTemplate.metadata.labels",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: {}}}}}",
        f"{ACTORS}.spec.containers",
        "must be a list",
        'must be of type array: "object"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [actor]}}}}",
        f"{ACTORS}.spec.containers[0]",
        "must be a map of fields",
        'must be of type object: "string"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [null]}}}}",
        f"{ACTORS}.spec.containers[0]",
        "must be a map of fields",
        'must be of type object: "null"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{image: x}]}}}}",
        f"{ACTORS}.spec.containers[0]",
        "has no name",
        "Required value",
        at="spec.actors.podTemplate.spec.containers[0].name",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{name: null}]}}}}",
        f"{ACTORS}.spec.containers[0]",
        "has no name",
        "Required value",
        at="spec.actors.podTemplate.spec.containers[0].name",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{name: 1}]}}}}",
        f"{ACTORS}.spec.containers[0].name",
        "must be text",
        'must be of type string: "integer"',
    ),
    Bad(
        f"spec: {{actors: {{podTemplate: {{spec: {{containers: [{', '.join(['{name: c}'] * 17)}]}}}}}}}}",
        f"{ACTORS}.spec.containers",
        "longer than 16 entries",
        "Too many: 17: must have at most 16 items",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {initContainers: [{name: c, env: {A: b}}]}}}}",
        f"{ACTORS}.spec.initContainers[0].env",
        "must be a list",
        at="spec.actors.podTemplate.spec.initContainers[0].env.A",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{name: c, env: [A=b]}]}}}}",
        f"{ACTORS}.spec.containers[0].env[0]",
        "must be a map of fields",
        'must be of type object: "string"',
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{name: c, env: [{value: x}]}]}}}}",
        f"{ACTORS}.spec.containers[0].env[0]",
        "has no name",
        "Required value",
        at="spec.actors.podTemplate.spec.containers[0].env[0].name",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {containers: [{name: c, env: [{$patch: replace}]}]}}}}",
        f"{ACTORS}.spec.containers[0].env[0]",
        "has no name",
        "Required value",
        at="spec.actors.podTemplate.spec.containers[0].env[0].name",
    ),
    Bad(
        "spec: {trainer: {podTemplate: {spec: {containers: [{name: c, env: [{name: RANK, value: '0'}]}]}}}}",
        "spec.trainer.podTemplate.spec.containers[0].env[0]",
        "is set by the run itself",
        "(got RANK); remove it",
    ),
    Bad(
        "spec: {actors: {podTemplate: {spec: {initContainers: [{name: c, env: [{name: A}, {name: INFLIGHT_ID}]}]}}}}",
        f"{ACTORS}.spec.initContainers[0].env[1]",
        "is set by the run itself",
        "(got INFLIGHT_ID); remove it",
    ),
    Bad(
        "spec: {coordinator: {podTemplate: {spec: {containers: [{name: c, env: [{name: PET_X, $patch: delete}]}]}}}}",
        "spec.coordinator.podTemplate.spec.containers[0].env[0]",
        "is set by the run itself",
        "(got PET_X); remove it",
    ),
]
MORE_ENGINE_ARGS: Final = [
    Bad(
        "spec: {inference: {engineArgs: {tensor_parallel_size: 2}}}",
        ENGINE,
        "set by the run itself",
        "(got 2); remove it: set spec.inference.tensorParallel",
        at="spec.inference.engineArgs.tensor_parallel_size",
        remedy="spec.inference.tensorParallel",
    ),
    Bad(
        "spec: {inference: {engineArgs: {--max-num-seqs: 4}}}",
        ENGINE,
        "set by the run itself",
        "(got 4); remove it: set spec.inference.maxConcurrent",
        at="spec.inference.engineArgs.--max-num-seqs",
        remedy="spec.inference.maxConcurrent",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max_model_len: 64}}}",
        ENGINE,
        "not spelt",
        "(got 64); write max-model-len",
        at="spec.inference.engineArgs.max_model_len",
        remedy="write max-model-len",
    ),
    Bad(
        "spec: {inference: {engineArgs: {enable-lora: true}}}",
        ENGINE,
        "set by the run itself",
        "(got true); remove it: the whole model is trained and updated",
        at="spec.inference.engineArgs.enable-lora",
        remedy="whole model",
    ),
    Bad(
        "spec: {inference: {engineArgs: {enable-lora: x}}}",
        ENGINE,
        "set by the run itself",
        'must be of type boolean: "string"',
        at="spec.inference.engineArgs.enable-lora",
        remedy="whole model",
    ),
    Bad(
        "spec: {inference: {engineArgs: {speculative-config: {model: x}}}}",
        ENGINE,
        "set by the run itself",
        "remove it: a draft model would stay at its first weights",
        at="spec.inference.engineArgs.speculative-config",
        remedy="draft",
    ),
    Bad(
        "spec: {inference: {engineArgs: {seed: 4}}}",
        ENGINE,
        "set by the run itself",
        "(got 4); remove it: set spec.algorithm.seed",
        at="spec.inference.engineArgs.seed",
        remedy="spec.algorithm.seed",
    ),
    Bad(
        "spec: {inference: {engineArgs: {seed: [4]}}}",
        ENGINE,
        "set by the run itself",
        'must be of type integer,string: "array"',
        at="spec.inference.engineArgs.seed",
        remedy="spec.algorithm.seed",
    ),
]
NOT_KNOWABLE: Final = [
    Bad(
        "spec: {inference: {engineArgs: {model: }}}",
        ENGINE,
        "set by the run itself",
        unknowable="the API server drops a null",
        remedy="spec.model.source",
    ),
    Bad(
        "spec: {inference: {engineArgs: {max-model-len: }}}",
        ENGINE,
        "has no value",
        unknowable="the API server drops a null",
        remedy="true for a bare flag",
    ),
    Bad(
        "spec: {inference: {engineArgs: {--no-enable-lora: true}}}",
        ENGINE,
        "set by the run itself",
        unknowable="one of endless spellings",
        remedy="whole model",
    ),
    Bad(
        "metadata: {name: , generateName: sort-}",
        "metadata.name",
        "give a value",
        unknowable="kubectl create makes a name; there is nobody to make one on one machine",
    ),
    Bad(
        "spec: {algorithm: {promptsPerStep: 1e2}}",
        "spec.algorithm.promptsPerStep",
        "write 100",
        unknowable="a whole number to JSON Schema; kubectl sends 100",
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: 1.0}}}}",
        "spec.actors.resources.limits.cpu",
        'in quotes: "1.0"',
        unknowable="a whole number to JSON Schema; kubectl sends 1",
    ),
    Bad(
        "metadata: {labels: {a: }}",
        "metadata.labels.a",
        "give a value",
        unknowable="the API server takes a null for an empty text",
    ),
    Bad(
        "status: {phase: Late}",
        "status.phase",
        "must be Pending",
        unknowable="the API server drops the status of what is created",
    ),
    Bad(
        "spec: {actors: {resources: {limits: {cpu: }}}}",
        "spec.actors.resources.limits.cpu",
        "give a value",
        unknowable="the API server drops a null",
    ),
    Bad(
        f"spec: {{environment: {{args: {'{a: ' * 34}1{'}' * 34}}}}}",
        "spec.environment.args",
        "levels deep",
        unknowable="a free-form map",
    ),
]

BAD_JOBS: Final = [
    *UNKNOWN_FIELDS,
    *WRONG_TYPES,
    *OUT_OF_BOUNDS,
    *NOT_IN_THE_SET,
    *BADLY_WRITTEN,
    *CONTRADICTIONS,
    *ENGINE_ARGS,
    *NOTHING,
    *NUMBERS,
    *TEXTS,
    *OVERLAYS,
    *MORE_ENGINE_ARGS,
    *NOT_KNOWABLE,
]

VALID_NEIGHBOURS: Final = [
    "spec: {sampling: {topP: 1, topK: -1}}",
    "spec: {sampling: {topP: 1.0, topK: 0}}",
    "spec: {algorithm: {loss: {isCap: null}}}",
    "spec: {algorithm: {loss: {isCap: 0}}, trainer: {optimizer: {gradClipNorm: 0}}}",
    "spec: {algorithm: {loss: {kind: ppo, clipLow: 0.1, clipHigh: 0.28}}}",
    "spec: {trainer: {microBatchTokens: 49}}",
    "spec: {sampling: {maxTokens: 2048}, trainer: {microBatchTokens: 4096}}",
    "spec: {weightSync: {intervalSteps: 5}}",
    "spec: {trainer: {engine: fsdp2, offloadOptimizer: true, activationCheckpointing: true, precision: bfloat16}}",
    "spec: {trainer: {engine: deepspeed, offloadOptimizer: true, zeroStage: 3}, model: {dtype: auto}}",
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
    "metadata: {annotations: {Example.com/A: x}}",
    "spec: {suspend: , sampling: , trainer: , inference: {engineArgs: , podTemplate: , resources: {limits: }}}",
    "metadata: {labels: , annotations: }",
    "spec: {actors: {podTemplate: {metadata: , spec: }}}",
    "spec: {actors: {podTemplate: {metadata: {labels: {inflight.dev/role: null, team: a}}}}}",
    "spec: {actors: {podTemplate: {spec: {containers: , initContainers: }}}}",
    "spec: {actors: {podTemplate: {spec: {containers: [{name: actor, env: }]}}}}",
    "spec: {actors: {podTemplate: {spec: {containers: [{name: actor, envFrom: [{configMapRef: {name: c}}]}]}}}}",
    "spec: {actors: {podTemplate: {spec: {containers: [{name: actor, env: [{name: MY_RANK, value: '1'}]}]}}}}",
    "spec: {actors: {podTemplate: {metadata: {labels: {app.kubernetes.io/part-of: x}, annotations: {a: b}}}}}",
    "spec: {actors: {podTemplate: {spec: {$patch: merge, nodeSelector: null}}}}",
    "spec: {algorithm: {seed: -0}}",
    "spec: {algorithm: {seed: 2147483647}}",
    "spec: {sampling: {stop: ['🛑', 'ж']}}",
    "spec: {sampling: {stop: []}}",
    "spec: {model: {source: null, volume: {claimName: m, subPath: modèles/ä}}}",
    f"spec: {{model: {{source: {'/' * 4096}}}}}",
    f"metadata: {{labels: {{example.com/a: {'x' * 63}, b: ''}}}}",
    "spec: {environment: {args: {big: 9223372036854775807, text: 'ü', list: [1, null, {a: .5}]}}}",
    "spec: {inference: {engineArgs: {block-size: 32, enforce-eager: true, c: {level: 0}, d: [a], e: 0.5}}}",
    "spec: {inference: {engineArgs: {kv-cache-memory-bytes: 9007199254740992}}}",
    "spec: {inference: {engine: reference}}",
    "spec: {coordinator: {storage: {size: 10, accessModes: [ReadWriteOnce, ReadWriteOncePod, ReadWriteMany]}}}",
]
"""Changes to :data:`GOOD` that differ little from wrong ones, and are right."""
