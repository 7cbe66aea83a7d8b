"""The CustomResourceDefinition; ``python -m inflight_operator.crd`` writes it.

The models are the one source: types, bounds, defaults and descriptions come from them (:mod:`.schema`), the rules that
concern several fields from :mod:`.validation`. What is committed under ``crds/`` is compared with this by a test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from inflight_operator.schema import MAX_MAP_ENTRIES, Schema, structural_schema
from inflight_operator.validation import MAX_CONTAINERS, MAX_ENV, ROLES, add_rules
from inflight_runtime.api import API_VERSION, KIND, RLTrainingJob
from inflight_runtime.api.loading import dump_yaml

GROUP, VERSION = API_VERSION.split("/")
PLURAL: Final = "rltrainingjobs"
SHORT_NAME: Final = "rltj"
TARGET: Final = Path("crds") / f"{PLURAL}.{GROUP}.yaml"
HEADER: Final = (
    "# Made by `python -m inflight_operator.crd` from runtime/inflight_runtime/api: change that, then run it again.\n"
)

MAX_TEXT: Final = 4096
"""Longest text of a declared field of a pod template: rules on a longer one cost too much to be accepted."""

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
    return HEADER + dump_yaml(build_crd())


def _schema() -> Schema:
    schema = structural_schema(RLTrainingJob)
    properties = schema["properties"]
    # The API server owns these three; of the metadata a schema may say nothing but how a name looks.
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}}
    properties["status"].pop("nullable", None)
    conditions = properties["status"]["properties"]["conditions"]
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    schema["required"] = ["spec"]
    for role in ROLES:
        properties["spec"]["properties"][role]["properties"]["podTemplate"] |= _overlay()
    return add_rules(schema)


def _overlay() -> Schema:
    """What of a pod template is declared, for rules to reach it; all else of it is let through as it is."""
    text = {"type": "string", "maxLength": MAX_TEXT}
    named = {"name": text}
    env = {"type": "array", "maxItems": MAX_ENV, "items": _open(named, required=["name"])}
    containers = {
        "type": "array",
        "maxItems": MAX_CONTAINERS,
        "items": _open({**named, "env": env}, required=["name"]),
    }
    labels = {"type": "object", "maxProperties": MAX_MAP_ENTRIES, "additionalProperties": text}
    return {
        "properties": {
            "metadata": _open({"labels": labels}),
            "spec": _open({"containers": containers, "initContainers": containers}),
        }
    }


def _open(properties: Schema, required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}
    return schema | ({"required": required} if required else {})


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
