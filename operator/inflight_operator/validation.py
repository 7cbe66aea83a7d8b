"""CEL rules of the custom resource: what several fields must agree on, and what may change while a job runs.

They repeat :mod:`inflight_runtime.api.rules` in the API server's language, so that ``kubectl apply`` refuses what
``inflight validate`` refuses; a test holds the two against each other on a real API server. What CEL cannot reach (the
names in a free-form map that nobody thought of) is refused by the operator with the condition ``Validated``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from inflight_runtime.api import MAX_NAME_LENGTH
from inflight_runtime.api.overlay import (
    ANOTHER_NAME,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_LABEL_PREFIXES,
    RESERVED_LABELS,
)
from inflight_runtime.api.placement import COUNTED_ENGINE_ARGS, RESERVED_ENGINE_ARGS
from inflight_runtime.api.rules import DEFAULT_MICRO_BATCH_TOKENS

ROLES: Final = ("coordinator", "inference", "actors", "trainer")
FREE_AT_RUN_TIME: Final = ("suspend", "lifecycle")
"""Sections of the spec that may change at any time."""
SCALABLE: Final = ("inference", "actors")
"""Sections whose ``replicas`` may."""
SWITCHES: Final = ("trust-remote-code", "headless", "skip-tokenizer-init", "enable-lora")
"""Reserved engine flags that are on or off."""
STRUCTURED: Final = ("weight-transfer-config", "override-generation-config", "speculative-config")
"""Reserved engine flags whose value is a map."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule.

    Attributes:
        at: path of the object that ``self`` is, from the root.
        rule: the expression; true when all is well.
        message: what is wrong, a semicolon, and how to mend it.
        value: a CEL expression of what stands there, to be shown: the API server itself shows it for no rule.
        field: path below ``at`` that the error names.
    """

    at: str
    rule: str
    message: str
    value: str = ""
    field: str = ""

    def to_wire(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.rule}
        if not self.value:
            entry["message"] = self.message
        else:
            # Not "+": the cost of joining texts is estimated by their lengths, and a number's is not known.
            template = self.message.replace("\\", r"\\").replace("'", r"\'").replace("%", "%%")
            entry["messageExpression"] = f"'{template.replace('; ', ' (got %s); ', 1)}'.format([{self.value}])"
        if self.field:
            entry["fieldPath"] = self.field
        return entry


def given(path: str) -> str:
    """CEL: an optional field is there and not null (``dyn``: a number compares with null in no other way)."""
    return f"(has({path}) && dyn({path}) != null)"


def absent(path: str) -> str:
    """CEL: an optional field is not there, or null."""
    return f"(!has({path}) || dyn({path}) == null)"


def _path_like(path: str) -> str:
    return f"({path}.startsWith('/') || {path}.startsWith('./') || {path}.startsWith('../') || {path} in ['.', '..'])"


def _model() -> list[Rule]:
    hub_id = f"{given('self.source')} && !{_path_like('self.source')}"
    rules = [
        Rule(
            "spec.model",
            f"{given('self.source')} || {given('self.volume')}",
            "says not where the model is; set source (a directory or a hub id) or volume (a claim)",
        ),
        Rule(
            "spec.model",
            f"{absent('self.source')} || {absent('self.volume')}",
            "has both source and volume; keep one of them",
        ),
    ]
    rules += [
        Rule(
            "spec.model",
            f"{absent(f'self.{name}')} || !self.{name}.startsWith('~')",
            '"~" is not expanded; write the whole path',
            f"self.{name}",
            f".{name}",
        )
        for name in ("source", "tokenizer")
    ]
    rules += [
        Rule(
            "spec.model",
            f"{absent(f'self.{name}')} || ({hub_id})",
            "belongs to a hub id only; remove it, or give a hub id as spec.model.source",
            value,
            f".{name}",
        )
        for name, value in (("revision", "self.revision"), ("tokenSecretRef", "self.tokenSecretRef.name"))
    ]
    rules.append(
        Rule(
            "spec.model.volume",
            "!has(self.subPath) || (!self.subPath.startsWith('/') && !self.subPath.split('/').exists(p, p == '..'))",
            'must be a relative path inside the claim; write it without a leading "/" and without ".."',
            "self.subPath",
            ".subPath",
        )
    )
    return rules


def _algorithm() -> list[Rule]:
    loss = "spec.algorithm.loss"
    rules = [
        Rule(
            loss,
            f"self.kind != 'ppo' || {absent('self.isCap')}",
            "has no meaning with kind ppo, which clips the ratio instead; remove it, or set kind: reinforce_tis",
            "self.isCap",
            ".isCap",
        )
    ]
    rules += [
        Rule(
            loss,
            f"self.kind != 'reinforce_tis' || {absent(f'self.{name}')}",
            "has no meaning with kind reinforce_tis, which caps the importance weight instead; remove it (see isCap), "
            "or set kind: ppo",
            f"self.{name}",
            f".{name}",
        )
        for name in ("clipLow", "clipHigh")
    ]
    rules += [
        Rule(
            "spec.sampling",
            f"{absent('self.topP')} || self.topP == 1.0",
            "nucleus sampling renormalises the probabilities, which biases the importance ratio of every token; remove "
            "topP and use temperature",
            "self.topP",
            ".topP",
        ),
        Rule(
            "spec.sampling",
            f"{absent('self.topK')} || self.topK in [-1, 0]",
            "top-k sampling renormalises the probabilities, which biases the importance ratio of every token; remove "
            "topK and use temperature",
            "self.topK",
            ".topK",
        ),
    ]
    return rules


_LONGEST: Final = "self.inference.engineArgs.max__dash__model__dash__len"


def _whole_spec() -> list[Rule]:
    group = "(self.algorithm.groupSize * self.sampling.maxTokens + 1)"
    least = f"({group} <= {DEFAULT_MICRO_BATCH_TOKENS} ? {group} : self.sampling.maxTokens + 1)"
    budget = "self.trainer.microBatchTokens"
    return [
        Rule(
            "spec",
            f"{absent(budget)} || {budget} >= {least}",
            "cannot hold one group (or one attempt of a long group) and its prompt; raise it to groupSize x maxTokens "
            "and the length of your prompts, lower these, or leave it out",
            "self.trainer.microBatchTokens",
            ".trainer.microBatchTokens",
        ),
        Rule(
            "spec",
            f"{absent('self.inference.replicas')} || self.inference.replicas <= 1 || "
            "self.inference.maxConcurrent >= self.algorithm.groupSize",
            "groups are given out whole, and no server could hold one; set it to spec.algorithm.groupSize or more",
            "self.inference.maxConcurrent",
            ".inference.maxConcurrent",
        ),
        Rule(
            "spec",
            f"!has({_LONGEST}) || self.sampling.maxTokens < {_LONGEST}",
            "leaves no room for a prompt: prompt and answer together have at most spec.inference.engineArgs."
            "max-model-len tokens; set it below max-model-len, or raise that",
            "self.sampling.maxTokens",
            ".sampling.maxTokens",
        ),
        Rule(
            "spec",
            "self.weightSync.intervalSteps <= self.algorithm.maxStaleness + 1",
            "makes tokens older than spec.algorithm.maxStaleness; set it to maxStaleness + 1 or less, or raise "
            "maxStaleness",
            "self.weightSync.intervalSteps",
            ".weightSync.intervalSteps",
        ),
        Rule(
            "spec",
            "self.trainer.optimizer.warmupSteps < self.algorithm.steps",
            "the run ends before the warm-up does; set it below spec.algorithm.steps",
            "self.trainer.optimizer.warmupSteps",
            ".trainer.optimizer.warmupSteps",
        ),
        Rule(
            "spec",
            f"{absent('self.evaluation')} || self.evaluation.everySteps <= self.algorithm.steps",
            "nothing would be evaluated; set it to spec.algorithm.steps or less, or remove spec.evaluation",
            "self.evaluation.everySteps",
            ".evaluation.everySteps",
        ),
        Rule(
            "spec",
            "self.trainer.engine == 'single' || self.trainer.nodes * self.trainer.processesPerNode <= "
            "self.algorithm.promptsPerStep * self.algorithm.groupSize",
            "some ranks would never have work; lower nodes x processesPerNode to promptsPerStep x groupSize or less",
            "self.trainer.processesPerNode",
            ".trainer.processesPerNode",
        ),
    ]


def _roles() -> list[Rule]:
    rules = [
        Rule(
            "spec.trainer",
            f"self.engine != 'single' || self.{name} == 1",
            "the engine single is one process that holds the whole model; set it to 1, or use fsdp2 or deepspeed",
            f"self.{name}",
            f".{name}",
        )
        for name in ("nodes", "processesPerNode")
    ]
    rules += [
        Rule(
            "spec.trainer",
            "self.engine == 'deepspeed' || self.zeroStage == 2",
            "is an option of the engine deepspeed; remove it, or set spec.trainer.engine to deepspeed",
            "self.zeroStage",
            ".zeroStage",
        ),
        Rule(
            "spec.trainer",
            "self.engine != 'single' || !self.offloadOptimizer",
            "the engine single has no such option; remove it, or set spec.trainer.engine to fsdp2 or deepspeed",
            "self.offloadOptimizer",
            ".offloadOptimizer",
        ),
        Rule(
            "spec.inference",
            "self.engine != 'reference' || self.tensorParallel == 1",
            "the engine reference does not split a model; set it to 1, or use engine: vllm",
            "self.tensorParallel",
            ".tensorParallel",
        ),
        # A rule sees none of the names that the schema does not declare, but how many fields there are.
        Rule(
            "spec.inference",
            "self.engine != 'reference' || "
            "size(dyn(self.engineArgs)) == (has(self.engineArgs.max__dash__model__dash__len) ? 1 : 0)",
            "the engine reference has no flag but max-model-len; remove all others, or use engine: vllm",
            field=".engineArgs",
        ),
        Rule(
            "spec.checkpoint",
            f"{absent('self.storage')} || {absent('self.claimName')}",
            "has both storage (a claim to be made) and claimName (one that exists); keep one of them",
        ),
        Rule(
            "spec.checkpoint",
            f"{absent('self.claimName')} || self.onDelete != 'Delete'",
            "a claim that the job did not make is not deleted with it; remove onDelete, or give storage instead of "
            "claimName",
            "self.onDelete",
            ".onDelete",
        ),
    ]
    return rules


def _overlays() -> list[Rule]:
    """What a pod template overlay must leave alone."""
    env = " && ".join(
        [f"!(self.name in {_list(RESERVED_ENV)})"]
        + [f"!self.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
    )
    reserved = " || ".join(
        [f"label in {_list(RESERVED_LABELS)}"] + [f"label.startsWith('{prefix}')" for prefix in RESERVED_LABEL_PREFIXES]
    )
    rules = []
    for role in ROLES:
        overlay = f"spec.{role}.podTemplate"
        rules += [
            Rule(
                overlay,
                "size(dyn(self)) == (has(self.metadata) ? 1 : 0) + (has(self.spec) ? 1 : 0)",
                "a pod template has metadata and spec; containers and all else belong under podTemplate.spec",
            ),
            Rule(
                f"{overlay}.metadata",
                f"!has(self.labels) || !self.labels.exists(label, {reserved})",
                f"selectors and the operator use these labels; {ANOTHER_NAME}",
                f"self.labels.filter(label, {reserved})",
                ".labels",
            ),
        ]
        rules += [
            Rule(f"{overlay}.spec.{kind}[].env[]", env, "is set by the run itself; remove it", "self.name")
            for kind in ("containers", "initContainers")
        ]
    return rules


def _list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(repr(name) for name in names)}]"


def refused_engine_args() -> dict[str, str]:
    """Engine flags that are refused, in the spellings that people use, with the message of each.

    The API server shows a rule only the names that the schema declares.
    """
    refused = {}
    for flag, remedy in RESERVED_ENGINE_ARGS.items():
        negated = [f"no-{flag}"] if flag in SWITCHES else []
        for spelling in (flag, *negated, *_misspelt(flag)):
            refused[spelling] = f"is set by the run itself; remove it: {remedy}"
    for flag in COUNTED_ENGINE_ARGS:
        for spelling in _misspelt(flag):
            refused[spelling] = f"is not spelt as a flag of the engine; write {flag}"
    return refused


def flag_of(spelling: str) -> str:
    """The engine flag that is meant by one of :func:`refused_engine_args`."""
    return spelling.lstrip("-").replace("_", "-").removeprefix("no-")


def _misspelt(flag: str) -> list[str]:
    return sorted({flag.replace("-", "_"), f"--{flag}"} - {flag})


def _engine_args() -> list[Rule]:
    return [
        Rule(
            f"spec.inference.engineArgs.{spelling}",
            "false",
            message,
            "" if flag_of(spelling) in STRUCTURED else "self",
        )
        for spelling, message in refused_engine_args().items()
    ]


def mutability_rules(schema: dict[str, Any]) -> list[Rule]:
    """While a job runs only ``suspend``, both ``replicas`` and ``lifecycle`` may change.

    On the parent, comparing with ``oldSelf``: a rule on a field itself is bypassed by null-then-set.

    Args:
        schema: the root schema, for the names of the fields.
    """
    spec = schema["properties"]["spec"]["properties"]
    remedy = "cannot change while the job runs; set spec.suspend: true first, and false again with the change"
    rules = []
    for section in spec:
        if section in FREE_AT_RUN_TIME:
            continue
        fields = [section]
        if section in SCALABLE:
            fields = [f"{section}.{name}" for name in spec[section]["properties"] if name != "replicas"]
        same = " && ".join(_same(field) for field in fields)
        rules.append(Rule("spec", f"oldSelf.suspend || ({same})", remedy, field=f".{section}"))
    return rules


def _same(field: str) -> str:
    """CEL: an optional field is what it was."""
    new, old = f"self.{field}", f"oldSelf.{field}"
    return f"(has({new}) == has({old}) && (!has({new}) || {new} == {old}))"


def all_rules() -> list[Rule]:
    """Every rule, in the order of the schema."""
    name = Rule(
        "",
        f"self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"a job's name has at most {MAX_NAME_LENGTH} lower-case letters, digits and dashes, begins with a letter and "
        "does not end with a dash (children's names are made from it); rename the job",
        "self.metadata.name",
        ".metadata.name",
    )
    return [name, *_model(), *_algorithm(), *_whole_spec(), *_roles(), *_engine_args(), *_overlays()]


def add_rules(schema: dict[str, Any]) -> dict[str, Any]:
    """Put the rules where they belong in the root schema; the schema is changed and returned.

    Raises:
        KeyError: a rule's path is not in the schema.
    """
    for rule in [*all_rules(), *mutability_rules(schema)]:
        node = schema
        for part in filter(None, rule.at.split(".")):
            node = node["properties"][part.removesuffix("[]")]
            if part.endswith("[]"):
                node = node["items"]
        node.setdefault("x-kubernetes-validations", []).append(rule.to_wire())
    return schema
