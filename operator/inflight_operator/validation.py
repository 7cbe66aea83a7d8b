"""CEL rules of the custom resource: what several fields must agree on, and what may change while a job runs.

They repeat :mod:`inflight_runtime.api.rules` in the API server's language, so that ``kubectl apply`` refuses what
``inflight validate`` refuses; a test holds the two against each other on a real API server. What CEL cannot reach (the
names in a free-form map) is refused by the operator with the condition ``Validated``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from inflight_runtime.api import MAX_NAME_LENGTH
from inflight_runtime.api.rules import DEFAULT_MICRO_BATCH_TOKENS

RESERVED_ENV: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "NODE_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Set by torchrun, JobSet or the operator; ``PET_*`` and ``INFLIGHT_*`` besides."""
ROLES: Final = ("coordinator", "inference", "actors", "trainer")
MAX_CONTAINERS: Final = 16
MAX_ENV: Final = 256
FREE_AT_RUN_TIME: Final = ("suspend", "lifecycle")
"""Sections of the spec that may change at any time."""
SCALABLE: Final = ("inference", "actors")
"""Sections whose ``replicas`` may."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One CEL rule.

    Attributes:
        at: path of the object that ``self`` is, from the root.
        rule: the expression; true when all is well.
        message: what is wrong and how to mend it.
        expression: a CEL expression that gives the message with the values in it, in place of ``message``.
        field: path below ``at`` that the error names.
    """

    at: str
    rule: str
    message: str
    expression: str = ""
    field: str = ""

    def to_wire(self) -> dict[str, str]:
        """The entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.rule, "message": self.message}
        if self.expression:
            entry["messageExpression"] = self.expression
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
            field=f".{name}",
        )
        for name in ("source", "tokenizer")
    ]
    rules += [
        Rule(
            "spec.model",
            f"{absent(f'self.{name}')} || ({hub_id})",
            "belongs to a hub id only; remove it, or give a hub id as spec.model.source",
            field=f".{name}",
        )
        for name in ("revision", "tokenSecretRef")
    ]
    rules.append(
        Rule(
            "spec.model.volume",
            "!has(self.subPath) || (!self.subPath.startsWith('/') && !self.subPath.split('/').exists(p, p == '..'))",
            'must be a relative path inside the claim; write it without a leading "/" and without ".."',
            field=".subPath",
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
            field=".isCap",
        )
    ]
    rules += [
        Rule(
            loss,
            f"self.kind != 'reinforce_tis' || {absent(f'self.{name}')}",
            "has no meaning with kind reinforce_tis, which caps the importance weight instead; remove it (see isCap), "
            "or set kind: ppo",
            field=f".{name}",
        )
        for name in ("clipLow", "clipHigh")
    ]
    rules += [
        Rule(
            "spec.sampling",
            f"{absent('self.topP')} || self.topP == 1.0",
            "nucleus sampling renormalises the probabilities, which biases the importance ratio of every token; remove "
            "topP and use temperature",
            field=".topP",
        ),
        Rule(
            "spec.sampling",
            f"{absent('self.topK')} || self.topK in [-1, 0]",
            "top-k sampling renormalises the probabilities, which biases the importance ratio of every token; remove "
            "topK and use temperature",
            field=".topK",
        ),
    ]
    return rules


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
            field=".trainer.microBatchTokens",
        ),
        Rule(
            "spec",
            f"{absent('self.inference.replicas')} || self.inference.replicas <= 1 || "
            "self.inference.maxConcurrent >= self.algorithm.groupSize",
            "groups are given out whole, and no server could hold one; set it to spec.algorithm.groupSize or more",
            field=".inference.maxConcurrent",
        ),
        Rule(
            "spec",
            "self.weightSync.intervalSteps <= self.algorithm.maxStaleness + 1",
            "makes tokens older than spec.algorithm.maxStaleness; set it to maxStaleness + 1 or less, or raise "
            "maxStaleness",
            field=".weightSync.intervalSteps",
        ),
        Rule(
            "spec",
            "self.trainer.optimizer.warmupSteps < self.algorithm.steps",
            "the run ends before the warm-up does; set it below spec.algorithm.steps",
            field=".trainer.optimizer.warmupSteps",
        ),
        Rule(
            "spec",
            f"{absent('self.evaluation')} || self.evaluation.everySteps <= self.algorithm.steps",
            "nothing would be evaluated; set it to spec.algorithm.steps or less, or remove spec.evaluation",
            field=".evaluation.everySteps",
        ),
    ]


def _roles() -> list[Rule]:
    rules = [
        Rule(
            "spec.trainer",
            f"self.engine != 'single' || self.{name} == 1",
            "the engine single is one process that holds the whole model; set it to 1",
            field=f".{name}",
        )
        for name in ("nodes", "processesPerNode")
    ]
    rules += [
        Rule(
            "spec.inference",
            "self.engine != 'reference' || self.tensorParallel == 1",
            "the engine reference does not split a model; set it to 1, or use engine: vllm",
            field=".tensorParallel",
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
            field=".onDelete",
        ),
    ]
    return rules


def _reserved() -> list[Rule]:
    """Names in a pod template overlay that the run sets itself."""
    listed = ", ".join(f"'{name}'" for name in RESERVED_ENV)
    labels = ", ".join(f"'app.kubernetes.io/{name}'" for name in ("name", "instance", "component", "managed-by"))
    return [
        Rule(
            f"spec.{role}.podTemplate.spec.{kind}[].env[]",
            f"!(self.name in [{listed}]) && !self.name.startsWith('PET_') && !self.name.startsWith('INFLIGHT_')",
            "is set by the run itself; remove it",
            "self.name + ' is set by the run itself; remove it'",
        )
        for role in ROLES
        for kind in ("containers", "initContainers")
    ] + [
        Rule(
            f"spec.{role}.podTemplate.metadata",
            "!has(self.labels) || self.labels.all(label, "
            f"!(label in [{labels}]) && !label.startsWith('inflight.dev/') && "
            "!label.startsWith('jobset.sigs.k8s.io/'))",
            "selectors and the operator use these labels: app.kubernetes.io/name, instance, component, managed-by, "
            "inflight.dev/*, jobset.sigs.k8s.io/*; choose another name",
            field=".labels",
        )
        for role in ROLES
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
    )
    return [name, *_model(), *_algorithm(), *_whole_spec(), *_roles(), *_reserved()]


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
