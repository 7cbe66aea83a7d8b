"""The generated part of the Helm chart; what helm and an API server say to it is in tests/control_plane."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from inflight_operator.install import CHART, OPERATOR_RULES, render_chart
from inflight_operator.install.__main__ import main
from inflight_operator.install.chart import GENERATED, README, TABLE_BEGINS, TABLE_ENDS, with_table
from inflight_operator.install.chart_values import NOT_VALUES, values_schema, variables
from inflight_operator.settings import Settings, settings_from

ROOT = Path(__file__).resolve().parents[3]
BY_HAND = {"README.md", ".helmignore", "NOTES.txt", "_helpers.tpl", "deployment.yaml", "pod-monitor.yaml"}


OBJECTS = ("resources", "settings.scrapeFrom")
"""Values with parts of their own; all other objects with known names are groups of values."""


@functools.cache
def files() -> dict[Path, str]:
    return render_chart()


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(files()[Path("values.yaml")])
    return found


def leaves(data: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values that are not groups, by their path."""
    for name, value in data.items():
        path, inner = prefix + name, schema["properties"][name]
        if "properties" in inner and path not in OBJECTS:
            yield from leaves(value, inner, f"{path}.")
        else:
            yield path, value


def test_the_committed_files_are_what_the_code_gives() -> None:
    chart = ROOT / CHART
    made = {path for path in chart.rglob("*") if path.is_file() and path.name not in BY_HAND}
    committed = {path.relative_to(chart): path.read_text() for path in made}
    assert committed == files(), "run: python -m inflight_operator.install (and remove what it does not write)"
    readme = (chart / README).read_text()
    assert with_table(readme) == readme, "run: python -m inflight_operator.install"


def test_the_command_writes_the_chart_and_the_table_of_its_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CHART.mkdir(parents=True)
    (CHART / README).write_text(f"before\n{TABLE_BEGINS}old\n{TABLE_ENDS}after\n")
    assert main([]) == 0
    written = {path: (CHART / path).read_text() for path in files()}
    assert written == files()
    readme = (CHART / README).read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n")
    assert "| `replicas` | `2` |" in readme
    assert "old" not in readme


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        with_table("prose")


def test_the_defaults_are_allowed_and_told() -> None:
    schema = values_schema()
    Draft7Validator.check_schema(schema)
    assert list(Draft7Validator(schema).iter_errors(values())) == []
    readme = (ROOT / CHART / README).read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|", readme, flags=re.MULTILINE))
    assert {path: json.dumps(value) for path, value in leaves(values(), schema)} == rows


def test_every_object_of_the_schema_knows_its_names() -> None:
    def unknown_names(schema: dict[str, Any], path: str) -> Iterator[str]:
        if "properties" in schema and schema.get("additionalProperties") is not False:
            yield path
        for name, inner in schema.get("properties", {}).items():
            yield from unknown_names(inner, f"{path}.{name}")

    assert list(unknown_names(values_schema(), "")) == []


def test_every_setting_of_the_operator_is_a_value_or_given_by_the_chart() -> None:
    given = {value.variable.removeprefix("INFLIGHT_").lower(): path for path, value in variables()}
    assert set(given) | set(NOT_VALUES) == set(Settings.model_fields)
    assert set(given) & set(NOT_VALUES) == {"registry", "run_as"}
    assert given["actor_startup_s"] == "settings.actorStartupSeconds"


def test_the_defaults_are_the_operators_own() -> None:
    text = {
        value.variable: json.dumps(value.default) if isinstance(value.default, dict) else str(value.default)
        for _, value in variables()
        if value.default not in ("", [])
    }
    assert settings_from(text) == Settings()


def test_the_definition_is_the_projects_own_and_is_kept() -> None:
    text = files()[GENERATED / "crd.yaml"]
    guard, _, rest = text.partition("{{- if .Values.crds.install }}\n")
    assert guard.startswith("{{/* Made by")
    definition = yaml.safe_load(rest.removesuffix("{{- end }}\n"))
    assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert definition == yaml.safe_load((ROOT / "crds" / "rltrainingjobs.inflight.dev.yaml").read_text())


def test_every_rule_has_its_reason_beside_it() -> None:
    for name in ("cluster-role.yaml", "role.yaml"):
        text = files()[GENERATED / name].replace("\n# ", " ")
        assert all(rule.reason in text for rule in OPERATOR_RULES)


def test_nothing_but_our_own_expressions_is_taken_for_a_template() -> None:
    for path, text in files().items():
        if path.parent == GENERATED and path.suffix == ".yaml":
            found = set(re.findall(r"\{\{.*?\}\}", text))
            assert {one for one in found if not one.startswith(("{{/* Made by", "{{- if", "{{- end"))} <= {
                "{{ .Release.Namespace }}"
            }
