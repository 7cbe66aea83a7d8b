"""The generated part of the Helm chart: everything that ``manifests/`` has too, and what follows from its values.

Written by hand are the Deployment, the PodMonitor, the notes and the prose of the README; a test renders the chart and
compares it with what kustomize gives.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any, Final

from inflight_operator import crd
from inflight_operator.builders import Manifest
from inflight_operator.install import deployment, rbac
from inflight_operator.install.chart_values import Value, values_schema, values_table, values_yaml, variables
from inflight_operator.install.files import HEADER, user_roles, with_rules
from inflight_operator.install.rbac import LEASE_ROLE, LEASE_RULES, NAME, OPERATOR_RULES
from inflight_runtime.api.loading import dump_yaml

CHART: Final = Path("charts") / "inflight"
GENERATED: Final = Path("templates") / "generated"
README: Final = "README.md"
TABLE_BEGINS: Final = "<!-- values: made by `python -m inflight_operator.install` -->\n"
TABLE_ENDS: Final = "<!-- end of values -->\n"
OLDEST_KUBERNETES: Final = "1.29"
"""From here on, CEL in definitions and ``podReplacementPolicy`` of Jobs are on by default. Tested with 1.34."""
RELEASE_NAMESPACE: Final = "{{ .Release.Namespace }}"
WHOLE_CLUSTER: Final = "not .Values.oneNamespace"
ONE_NAMESPACE: Final = ".Values.oneNamespace"


def render_chart() -> dict[Path, str]:
    """Text of every generated file, by its path below :data:`CHART`."""
    templates = {
        "crd.yaml": _if(".Values.crds.install", _crd()),
        "service-account.yaml": _text(deployment.service_account()),
        "lease.yaml": _text(deployment.lease()),
        "lease-role.yaml": with_rules(_role(LEASE_ROLE), LEASE_RULES),
        "lease-role-binding.yaml": _text(_binding("Role", LEASE_ROLE)),
        "cluster-role.yaml": _if(
            WHOLE_CLUSTER, with_rules(rbac.cluster_role(NAME, deployment.operator_labels()), OPERATOR_RULES)
        ),
        "cluster-role-binding.yaml": _if(WHOLE_CLUSTER, dump_yaml(_binding("ClusterRole", NAME))),
        "user-roles.yaml": _if(WHOLE_CLUSTER, "---\n".join(user_roles())),
        "role.yaml": _if(ONE_NAMESPACE, with_rules(_role(NAME), OPERATOR_RULES)),
        "role-binding.yaml": _if(ONE_NAMESPACE, _text(_binding("Role", NAME))),
        "metrics-service.yaml": _text(deployment.metrics_service()),
        "disruption-budget.yaml": _if(".Values.podDisruptionBudget.enabled", _text(deployment.disruption_budget())),
        "_settings.tpl": _settings(),
    }
    return {
        Path("Chart.yaml"): HEADER + dump_yaml(_chart()),
        Path("values.yaml"): HEADER + "\n" + values_yaml(),
        Path("values.schema.json"): json.dumps(values_schema(), indent=2) + "\n",
        **{GENERATED / name: _template(text) for name, text in templates.items()},
    }


def with_table(readme: str) -> str:
    """The README's text with the table of values as it should be.

    Raises:
        ValueError: the marks that the table stands between are not there.
    """
    before, begin, rest = readme.partition(TABLE_BEGINS)
    _, end, after = rest.partition(TABLE_ENDS)
    if not (begin and end):
        raise ValueError(f"{README} lacks {TABLE_BEGINS!r} or {TABLE_ENDS!r}")
    return f"{before}{begin}\n{values_table()}\n\n{end}{after}"


def _chart() -> dict[str, Any]:
    version = importlib.metadata.version("inflight")
    return {
        "apiVersion": "v2",
        "name": "inflight",
        "description": "Operator for asynchronous RL post-training of language models: RLTrainingJob and what runs it.",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": f">={OLDEST_KUBERNETES}.0-0",
        "keywords": ["reinforcement-learning", "llm", "grpo", "vllm", "operator"],
    }


def _crd() -> str:
    """The definition, kept when the release goes: with it would go every job."""
    definition = crd.build_crd()
    definition["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    # Through JSON: parts that are one object in memory would be written as YAML anchors and aliases.
    return dump_yaml(json.loads(json.dumps(definition)))


def _settings() -> str:
    """Environment variables of all settings that differ from the operator's own defaults."""
    calls = [
        f'{{{{- include "inflight.setting" (list "{value.variable}" .Values.{path} {_literal(value)}) }}}}\n'
        for path, value in variables()
    ]
    return "".join(['{{- define "inflight.settings" }}\n', *calls, "{{- end }}\n"])


def _literal(value: Value) -> str:
    """A default as the template language writes it."""
    return {"[]": "list", "{}": "dict"}.get(json.dumps(value.default), json.dumps(value.default))


def _role(name: str) -> Manifest:
    return _placed(rbac.role(name, deployment.operator_labels()))


def _binding(kind: str, name: str) -> Manifest:
    binding = rbac.binding(kind, name, deployment.operator_labels())
    subjects = [{**subject, "namespace": RELEASE_NAMESPACE} for subject in binding["subjects"]]
    return binding | {"subjects": subjects}


def _placed(manifest: Manifest) -> Manifest:
    """In the release's namespace, also for those who apply what ``helm template`` prints."""
    metadata = manifest["metadata"]
    placed = {"name": metadata["name"], "namespace": RELEASE_NAMESPACE}
    return manifest | {"metadata": placed | {key: metadata[key] for key in metadata if key not in placed}}


def _text(manifest: Manifest) -> str:
    return dump_yaml(_placed(manifest))


def _if(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _template(text: str) -> str:
    return f"{{{{/* {HEADER.removeprefix('# ').strip()} */ -}}}}\n{text}"
