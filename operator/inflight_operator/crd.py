"""The CustomResourceDefinition; ``python -m inflight_operator.crd`` writes it.

The models are the one source: types, bounds, defaults and descriptions come from them (:mod:`.schema`), the rules that
concern several fields from :mod:`.validation`. What is committed under ``crds/`` is compared with this by a test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from inflight_operator.schema import Schema, structural_schema
from inflight_operator.validation import ROLES, STRUCTURED, SWITCHES, add_rules, flag_of, refused_engine_args
from inflight_runtime.api import API_VERSION, KIND, RLTrainingJob, show
from inflight_runtime.api.loading import dump_yaml
from inflight_runtime.api.overlay import MAX_CONTAINERS, MAX_ENV, MAX_LABELS, MAX_TEXT
from inflight_runtime.api.placement import MAX_COUNT

GROUP, VERSION = API_VERSION.split("/")
PLURAL: Final = "rltrainingjobs"
SHORT_NAME: Final = "rltj"
TARGET: Final = Path("crds") / f"{PLURAL}.{GROUP}.yaml"
HEADER: Final = (
    "# Made by `python -m inflight_operator.crd` from runtime/inflight_runtime/api: change that, then run it again.\n"
)

UNSEEN: Final = {"observedGeneration": 0}
"""Status of a job that no operator has seen: kstatus would take one without any for finished; this it waits for."""
COLUMNS: Final[tuple[tuple[str, str, str, str, int], ...]] = (
    ("Phase", "string", ".status.phase", "State of the run in one word", 0),
    ("Step", "integer", ".status.progress.step", "Optimizer steps done", 0),
    ("Reward", "number", ".status.progress.rewardMean", "Mean reward of the last step", 0),
    ("Inference", "integer", ".status.inference.ready", "Inference servers that are ready", 0),
    ("Actors", "integer", ".status.actors.ready", "Actors that are ready", 0),
    ("Trainer", "integer", ".status.trainer.ready", "Trainer nodes that are ready", 0),
    ("Restarts", "integer", ".status.restarts", "Restarts of the trainer", 0),
    ("Age", "date", ".metadata.creationTimestamp", "", 0),
    ("Steps", "integer", ".spec.algorithm.steps", "Optimizer steps of the whole run", 1),
    ("GPUs", "integer", ".status.gpus", "GPUs that all roles ask for together", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not", 1),
)
"""Name, type, path, description, priority (1: ``-o wide`` only)."""


def build_crd() -> dict[str, Any]:
    """The whole CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/name": "inflight"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.inference.replicas",
                            "statusReplicasPath": ".status.inference.ready",
                            "labelSelectorPath": ".status.inference.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*column) for column in COLUMNS],
                }
            ],
        },
    }


def render_crd() -> str:
    """The file's text."""
    # Through JSON: parts that are one object in memory would be written as YAML anchors and aliases.
    return HEADER + dump_yaml(json.loads(json.dumps(build_crd())))


def _schema() -> Schema:
    schema = structural_schema(RLTrainingJob)
    properties = schema["properties"]
    # The API server owns these three; of the metadata a schema may say nothing but how a name looks.
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string", "description": properties[name]["description"]}
    properties["metadata"] = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}}
    properties["status"].pop("nullable", None)
    # What the operator has not said is not there; a default would only bring back empty texts.
    _drop_defaults(properties["status"])
    conditions = properties["status"]["properties"]["conditions"]
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    properties["status"]["default"] = dict(UNSEEN)
    schema["required"] = ["spec"]
    _tell_bounds(properties["spec"])
    for role in ROLES:
        properties["spec"]["properties"][role]["properties"]["podTemplate"] |= _overlay()
    properties["spec"]["properties"]["inference"]["properties"]["engineArgs"]["properties"] = _engine_args()
    return add_rules(schema)


def _tell_bounds(schema: Schema) -> None:
    """Put default and bounds into the descriptions: ``kubectl explain`` shows neither."""
    for part in schema.get("properties", {}).values():
        _tell_bounds(part)
        words = []
        default = part.get("default")
        if default not in (None, "", []) and not isinstance(default, dict):
            words.append(f"default {default if isinstance(default, str) else show(default)}")
        for bound, inclusive, exclusive in (("minimum", "at least", "above"), ("maximum", "at most", "below")):
            if bound in part:
                words.append(f"{exclusive if part.get(f'exclusive{bound.capitalize()}') else inclusive} {part[bound]}")
        if words:
            words[0] = words[0][0].upper() + words[0][1:]
            part["description"] += f" {', '.join(words)}."


def _overlay() -> Schema:
    """What of a pod template is declared, for rules to reach it; all else of it is let through as it is."""
    labels = {
        "type": "object",
        "description": "More labels of the pods; those that selectors and the operator use are refused.",
        "maxProperties": MAX_LABELS,
        "additionalProperties": _text(),
    }
    pod = {
        "containers": _containers("Containers, merged by name; the role's own is named after the role."),
        "initContainers": _containers("Init containers, merged by name."),
    }
    return {
        "properties": {
            "metadata": _open({"labels": labels}, "Labels and annotations of the pods."),
            "spec": _open(pod, "A partial PodSpec."),
        }
    }


def _containers(description: str) -> Schema:
    variable = {"name": _text("Name of the variable; one that the run sets itself is refused.")}
    env = {
        "type": "array",
        "description": "Environment variables, merged by name.",
        "maxItems": MAX_ENV,
        "items": _open(variable, required=["name"]),
    }
    container = {"name": _text("Name of the container."), "env": env}
    items = _open(container, required=["name"])
    return {"type": "array", "description": description, "maxItems": MAX_CONTAINERS, "items": items}


def _text(description: str = "") -> Schema:
    return {"type": "string", "maxLength": MAX_TEXT, **({"description": description} if description else {})}


def _engine_args() -> Schema:
    """Flags that a rule refuses or reads; all others are let through as they are."""
    count = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
    declared = {
        "max-model-len": {"description": "Longest sequence, prompt and answer together, in tokens.", **count},
        "kv-cache-memory-bytes": {"description": "Size of the KV cache.", **count},
    }
    for spelling, message in refused_engine_args().items():
        flag = flag_of(spelling)
        kind: Schema = {"x-kubernetes-int-or-string": True, "maxLength": MAX_TEXT}
        if flag in SWITCHES:
            kind = {"type": "boolean"}
        elif flag in STRUCTURED:
            kind = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        declared[spelling] = {"description": f"Refused: it {message}.", **kind}
    return declared


def _drop_defaults(schema: Schema) -> None:
    schema.pop("default", None)
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            _drop_defaults(part)


def _open(properties: Schema, description: str = "", required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}
    if description:
        schema["description"] = description
    if required:
        schema["required"] = required
    return schema


def _column(name: str, kind: str, path: str, description: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    if description:
        column["description"] = description
    if priority:
        column["priority"] = priority
    return column


def main() -> int:
    """Write the file into ``crds/`` of the working directory."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render_crd())
    sys.stdout.write(f"wrote {TARGET}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
