"""The values of the Helm chart: one table, from which its values, their schema and their description are made.

Every setting of the operator (:class:`~inflight_operator.settings.Settings`) is a value, but for those that the chart
gives itself. A default here is the default there: what is left alone is not passed on, and follows the operator.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from inflight_operator.install import deployment
from inflight_operator.settings import PREFIX, Settings
from inflight_runtime.api.loading import dump_yaml

WIDTH: Final = 110
SETTINGS: Final = "settings"
NOT_VALUES: Final = {
    "namespace": "oneNamespace",
    "lease_namespace": "the release's own",
    "operator_namespace": "the release's own",
    "operator_labels": "those of the chart's pods",
    "http_host": "the pod's own network",
    "http_port": "the port that the probes ask",
    "coordinator_url": "only for an operator outside of the cluster",
    "registry": "registry, which the operator's image comes from, too",
    "run_as": "runAs, which the operator's pods run as, too",
}
"""Settings that are no values below ``settings``, and what gives them instead."""

Schema = Mapping[str, Any]
TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
TEXTS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
OBJECT: Final[Schema] = {"type": "object"}
OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
WORD: Final = "[^\\s:@/]+"
REGISTRY: Final = f"^({WORD}(:[0-9]+)?(/{WORD})*/?)?$"
REPOSITORY: Final = f"^({WORD}(:[0-9]+)?/)?{WORD}(/{WORD})*$"
"""Neither has a scheme, a tag or a digest."""
QUANTITIES: Final[Schema] = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
SECRETS: Final[Schema] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
KEYWORDS: Final = ("type", "enum", "minimum", "maximum")
"""What of a setting's own schema says which values it may have."""
SHAPES: Final = {
    "image_pull_secrets": SECRETS,
    "scrape_from": {
        "type": "object",
        "properties": dict.fromkeys(("podSelector", "namespaceSelector", "ipBlock"), OBJECT),
        "additionalProperties": False,
    },
}
"""Settings that are written in another way in a chart than in an environment variable, or are better known."""
ABOUT: Final = {
    "image_pull_secrets": "Secrets for private registries: [{name: ...}], each of them in the job's own namespace."
}


@dataclass(frozen=True, slots=True)
class Value:
    """One value, or a group of them.

    Attributes:
        about: what it is, in a sentence or two.
        default: unless somebody gives it.
        schema: JSON Schema of what may be given.
        group: the values in it; then it has neither default nor schema of its own.
        variable: the environment variable that it becomes; empty for none.
    """

    about: str
    default: Any = None
    schema: Schema | None = None
    group: Mapping[str, Value] | None = None
    variable: str = ""


def values() -> dict[str, Value]:
    """All values of the chart, in the order of its file."""
    resources = deployment.deployment()["spec"]["template"]["spec"]["containers"][0]["resources"]
    return {
        "registry": Value(
            "Registry and path in front of the operator's image and of the default images of jobs, for instance"
            " registry.example.com/ml.",
            "",
            {"type": "string", "pattern": REGISTRY},
            variable=f"{PREFIX}REGISTRY",
        ),
        "image": Value(
            "The operator's image.",
            group={
                "repository": Value(
                    "Its name, without the registry.", deployment.IMAGE, {"type": "string", "pattern": REPOSITORY}
                ),
                "tag": Value("Left empty: the chart's appVersion.", "", {"type": "string", "pattern": "^[\\w.-]*$"}),
                "digest": Value(
                    "sha256:..., to pin it; wins over the tag.",
                    "",
                    {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                ),
                "pullPolicy": Value(
                    "Left empty: the cluster's default.",
                    "",
                    {"enum": ["", "Always", "IfNotPresent", "Never"]},
                ),
            },
        ),
        "imagePullSecrets": Value(
            "Secrets of the release's namespace that the operator's pods pull with: [{name: ...}]. Those of jobs:"
            " settings.imagePullSecrets.",
            [],
            SECRETS,
        ),
        "oneNamespace": Value(
            "Work in the release's own namespace only, with Roles instead of ClusterRoles; jobs run beside the"
            " operator. Never beside another operator that sees the same jobs.",
            False,
            FLAG,
        ),
        "crds": Value(
            "The definition of RLTrainingJob. It is kept when the release is uninstalled, and with it every job.",
            group={
                "install": Value(
                    "Install and upgrade it with the release. false: somebody else applies crds/, which needs rights in"
                    " the whole cluster.",
                    True,
                    FLAG,
                )
            },
        ),
        "replicas": Value(
            "Pods of the operator. One acts; another takes over within 20 seconds when it dies.",
            deployment.REPLICAS,
            {"type": "integer", "minimum": 0, "maximum": 10},
        ),
        "resources": Value(
            "Requests and limits of the operator's container.",
            resources,
            {
                "type": "object",
                "properties": {"requests": QUANTITIES, "limits": QUANTITIES, "claims": OBJECTS},
                "additionalProperties": False,
            },
        ),
        "runAs": Value(
            'User and group of the operator\'s pods and of all pods of jobs; "none" leaves them to the cluster'
            " (OpenShift assigns its own).",
            deployment.USER,
            {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "none"}]},
            variable=f"{PREFIX}RUN_AS",
        ),
        "nodeSelector": Value("Labels of nodes that the operator may run on.", {}, TEXTS),
        "tolerations": Value("Taints of nodes that the operator tolerates.", [], OBJECTS),
        "affinity": Value("Affinity of the operator's pods; they are spread over nodes in any case.", {}, OBJECT),
        "priorityClassName": Value("PriorityClass of the operator's pods.", "", TEXT),
        "podAnnotations": Value("Annotations of the operator's pods.", {}, TEXTS),
        "podLabels": Value("Labels of the operator's pods, besides their own.", {}, TEXTS),
        "extraEnv": Value(
            "Environment variables of the operator besides its settings: [{name: ..., value: ...}].", [], OBJECTS
        ),
        "podDisruptionBudget": Value(
            "Keeps a drain of several nodes from taking all replicas at once.",
            group={"enabled": Value("Make a PodDisruptionBudget of the operator's pods.", True, FLAG)},
        ),
        "podMonitor": Value(
            "For the Prometheus operator. Without it, the Service inflight-operator-metrics can be scraped.",
            group={
                "enabled": Value(
                    "Make a PodMonitor of the operator's pods; the cluster must know the kind.",
                    False,
                    FLAG,
                ),
                "jobs": Value(
                    "Make another one of the coordinators, servers and actors of all jobs; settings.scrapeFrom has to"
                    " let your Prometheus in.",
                    False,
                    FLAG,
                ),
                "interval": Value(
                    "Between two scrapes.", "30s", {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
                ),
                "labels": Value("Labels that your Prometheus selects PodMonitors by.", {}, TEXTS),
            },
        ),
        SETTINGS: Value(
            "What an installation decides for all of its jobs. A job's own word wins.",
            group=_settings(),
        ),
    }


def values_yaml() -> str:
    """``values.yaml``: the defaults, each with what it is."""
    return "\n".join(_yaml(values(), ""))


def values_schema() -> dict[str, Any]:
    """``values.schema.json``, which helm holds what is given against; unknown names are refused."""
    schema = _schema(values())
    # Helm hands a chart the values that all charts of a release share.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart inflight", **schema}


def values_table() -> str:
    """The values as rows of a Markdown table."""
    rows = [f"| `{path}` | `{json.dumps(value.default)}` | {value.about} |" for path, value in _flat(values())]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows])


def variables() -> list[tuple[str, Value]]:
    """Values that become an environment variable of the operator, by their path."""
    return [(path, value) for path, value in _flat(values()) if value.variable]


def _settings() -> dict[str, Value]:
    properties = Settings.model_json_schema()["properties"]
    defaults = Settings().model_dump(mode="json")
    found = {}
    for field, info in Settings.model_fields.items():
        if field in NOT_VALUES:
            continue
        schema = {key: properties[field][key] for key in KEYWORDS if key in properties[field]}
        assert schema and info.description, field
        about = ABOUT.get(field, " ".join(info.description.split()))
        given = SHAPES.get(field, schema)
        found[_value_name(field)] = Value(about, defaults[field], given, variable=PREFIX + field.upper())
    return found


def _value_name(field: str) -> str:
    """``actor_startup_s`` becomes ``actorStartupSeconds``."""
    first, *rest = field.split("_")
    return first + "".join("Seconds" if word == "s" else word.capitalize() for word in rest)


def _flat(group: Mapping[str, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in group.items():
        if value.group is None:
            yield prefix + name, value
        else:
            yield from _flat(value.group, f"{prefix}{name}.")


def _yaml(group: Mapping[str, Value], indent: str) -> Iterator[str]:
    for name, value in group.items():
        yield from textwrap.wrap(value.about, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if value.group is None:
            text = dump_yaml({name: value.default}).rstrip("\n") if value.default != "" else f'{name}: ""'
            yield textwrap.indent(text, indent)
        else:
            yield f"{indent}{name}:"
            yield from _yaml(value.group, indent + "  ")
        if not indent:
            yield ""


def _schema(group: Mapping[str, Value]) -> dict[str, Any]:
    properties = {
        name: {"description": value.about, **(value.schema or {} if value.group is None else _schema(value.group))}
        for name, value in group.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}
