"""What is installed into a cluster: what the files can tell; what an API server says is in tests/control_plane."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight_operator.builders.pods import HOME
from inflight_operator.crd import build_crd
from inflight_operator.install import DIRECTORY, LEASE_RULES, OPERATOR_RULES, USER_ROLES, render_files
from inflight_operator.install.__main__ import main
from inflight_operator.kube import KINDS
from inflight_operator.names import WATCH_SELECTOR
from inflight_operator.settings import Settings, settings_from
from inflight_runtime.actor import Answer, Reward, load_environment
from inflight_runtime.api import load_job
from inflight_runtime.config.roles import EnvironmentSpec
from support.cluster_jobs import CODE, children

ROOT = Path(__file__).resolve().parents[3]
MAXIMAL = Path(__file__).parent / "golden" / "maximal.job.yaml"
EXAMPLE = ROOT / "examples" / "gitops"
NO_OBJECTS = ("kustomization.yaml", "inflight.yaml", "one_namespace.yaml")
"""Kustomize's own files, and a patch."""
CLUSTER_KINDS = {"Namespace", "ClusterRole", "ClusterRoleBinding"}


@functools.cache
def documents(prefix: str = "") -> list[dict[str, Any]]:
    """All Kubernetes objects in the files below ``prefix``."""
    return [
        document
        for path, text in render_files().items()
        if path.is_relative_to(prefix) and path.name not in NO_OBJECTS
        for document in yaml.safe_load_all(text)
    ]


def one(kind: str, name: str = "inflight-operator") -> dict[str, Any]:
    (found,) = [each for each in documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def all_rules() -> list[dict[str, Any]]:
    return [rule for role in documents() if role["kind"] in ("Role", "ClusterRole") for rule in role["rules"]]


def operator_may(group: str, resource: str) -> set[str]:
    verbs = [set(rule.verbs) for rule in OPERATOR_RULES if rule.group == group and resource in rule.resources]
    return set().union(*verbs)


def test_the_committed_files_are_what_the_code_gives() -> None:
    committed = {path.relative_to(ROOT / DIRECTORY): path.read_text() for path in (ROOT / DIRECTORY).rglob("*.yaml")}
    assert committed == render_files(), "run: python -m inflight_operator.install (and remove what it does not write)"


def test_the_command_writes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    written = {path.relative_to(DIRECTORY): (tmp_path / path).read_text() for path in Path(DIRECTORY).rglob("*.yaml")}
    assert written == render_files()


def test_no_rule_has_a_wildcard() -> None:
    rules = all_rules()
    assert len(rules) == 2 * len(OPERATOR_RULES) + len(LEASE_RULES) + sum(map(len, USER_ROLES.values()))
    for rule in rules:
        assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
        assert not any("*" in text for texts in rule.values() for text in texts), rule


def test_secrets_are_never_listed_watched_or_changed() -> None:
    verbs = {verb for rule in all_rules() if "secrets" in rule["resources"] for verb in rule["verbs"]}
    assert verbs == {"create", "get", "delete"}


def test_a_jobs_spec_is_never_written_by_the_operator() -> None:
    assert operator_may("inflight.dev", "rltrainingjobs") == {"get", "list", "watch"}
    assert operator_may("inflight.dev", "rltrainingjobs/status") == {"get", "patch"}
    assert operator_may("inflight.dev", "rltrainingjobs/finalizers") == {"update"}


def test_nothing_is_granted_on_rights_nodes_namespaces_or_definitions() -> None:
    groups = {group for rule in all_rules() for group in rule["apiGroups"]}
    assert groups == {
        "",
        "apps",
        "batch",
        "coordination.k8s.io",
        "inflight.dev",
        "jobset.x-k8s.io",
        "networking.k8s.io",
        "policy",
    }
    core = {resource for rule in all_rules() if rule["apiGroups"] == [""] for resource in rule["resources"]}
    assert core == {"serviceaccounts", "configmaps", "services", "persistentvolumeclaims", "secrets", "pods", "events"}


def test_every_kind_that_the_operator_works_with_has_a_rule() -> None:
    for kind in KINDS.values():
        group = kind.api_version.rpartition("/")[0]
        assert operator_may(group, kind.plural) or kind.kind == "Lease", kind


def test_every_child_can_be_made_and_taken_away() -> None:
    kinds = {child.kind for child in children(load_job(MAXIMAL), code=CODE)}
    assert len(kinds) > 8
    for kind in (KINDS[name] for name in kinds):
        verbs = operator_may(kind.api_version.rpartition("/")[0], kind.plural)
        assert {"get", "create", "delete"} <= verbs, kind
        # All but the token are watched and repaired.
        assert kind.kind == "Secret" or {"list", "watch", "patch"} <= verbs, kind


def test_the_lease_is_the_only_one_and_has_no_spec() -> None:
    assert set(one("Lease")) == {"apiVersion", "kind", "metadata"}
    assert one("Role", "inflight-operator-lease")["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["inflight-operator"],
            "verbs": ["get", "patch"],
        }
    ]


def test_one_namespace_gets_the_same_rights_as_the_cluster() -> None:
    assert one("Role")["rules"] == one("ClusterRole")["rules"] == [rule.manifest() for rule in OPERATOR_RULES]


def test_one_namespace_makes_nothing_outside_of_it() -> None:
    found = [*documents("base"), *documents("namespaced")]
    assert not CLUSTER_KINDS & {document["kind"] for document in found}
    # No object names a namespace, nor does a subject: it is the one that the objects are applied to.
    assert "namespace: " not in yaml.safe_dump(found)
    patch = yaml.safe_load(render_files()[Path("namespaced/one_namespace.yaml")])
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container == {
        "name": one("Deployment")["spec"]["template"]["spec"]["containers"][0]["name"],
        "env": [{"name": "INFLIGHT_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
    }


def test_no_subject_names_a_namespace() -> None:
    # Kustomize would leave it behind when an installation chooses another one.
    bindings = [document for document in documents() if document["kind"].endswith("RoleBinding")]
    assert len(bindings) == 3
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "inflight-operator"}]


def test_every_rule_has_its_reason_beside_it() -> None:
    text = render_files()[Path("cluster/cluster_role.yaml")]
    assert text.count("\n# ") >= len(OPERATOR_RULES)
    for rule in OPERATOR_RULES:
        assert rule.reason in text.replace("\n# ", " "), rule


@pytest.mark.parametrize(
    ("built_in", "verbs"),
    [
        ("view", {"get", "list", "watch"}),
        ("edit", {"create", "delete", "deletecollection", "patch", "update"}),
    ],
)
def test_user_roles_are_added_to_the_built_in_ones(built_in: str, verbs: set[str]) -> None:
    role = one("ClusterRole", f"inflight-{built_in}")
    aggregated = {label for label in role["metadata"]["labels"] if label.startswith("rbac.")}
    assert aggregated == {f"rbac.authorization.k8s.io/aggregate-to-{built_in}"}
    assert set(role["rules"][0]["verbs"]) == verbs
    written = {resource for rule in role["rules"] if "patch" in rule["verbs"] for resource in rule["resources"]}
    assert "rltrainingjobs/status" not in written


def test_the_deployment_meets_the_restricted_pod_security_standard() -> None:
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    enforced = one("Namespace", "inflight-system")["metadata"]["labels"]
    assert enforced["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_container_writes_to_its_own_volume_only_and_has_bounds() -> None:
    (container,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": HOME}]
    assert {"name": "HOME", "value": HOME} in container["env"]
    assert set(container["resources"]["requests"]) == set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_probes_and_metrics_reach_the_port_that_the_operator_is_told() -> None:
    (container,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert {"name": "INFLIGHT_HTTP_PORT", "value": str(port["containerPort"])} in container["env"]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    (scraped,) = one("Service", "inflight-operator-metrics")["spec"]["ports"]
    assert scraped["targetPort"] == port["name"]


def test_the_variables_of_the_container_are_settings() -> None:
    (container,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    environ = {entry["name"]: entry.get("value", "of-the-pod") for entry in container["env"]}
    settings = settings_from(environ)
    given = {f"INFLIGHT_{name.upper()}" for name in settings.model_fields_set} | {"HOME"}
    assert given == set(environ)
    assert settings.operator_namespace == settings.lease_namespace == "of-the-pod"
    assert settings.namespace == ""


def test_only_tokens_that_are_asked_for_are_given() -> None:
    assert one("ServiceAccount")["automountServiceAccountToken"] is False
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["serviceAccountName"] == "inflight-operator"


def test_the_operators_pods_are_those_that_jobs_let_in() -> None:
    labels = Settings().operator_labels
    spec = one("Deployment")["spec"]
    assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"] == labels
    assert one("PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": labels}
    assert one("Service", "inflight-operator-metrics")["spec"]["selector"] == labels


def test_nothing_that_is_installed_looks_like_a_child_of_a_job() -> None:
    key, value = WATCH_SELECTOR.split("=")
    template = one("Deployment")["spec"]["template"]
    for labelled in (*documents(), template):
        assert labelled["metadata"]["labels"].get(key) != value, labelled


def test_kustomize_is_told_of_fields_that_there_are() -> None:
    config = yaml.safe_load(render_files()[Path("kustomize-config/inflight.yaml")])
    fields = [*config["images"], *(field for target in config["nameReference"] for field in target["fieldSpecs"])]
    assert len(fields) > 60
    (version,) = build_crd()["spec"]["versions"]
    for field in fields:
        assert (field["group"], field["kind"]) == ("inflight.dev", "RLTrainingJob")
        schema = version["schema"]["openAPIV3Schema"]
        for part in field["path"].split("/"):
            if "podTemplate" in field["path"] and part == "podTemplate":
                assert schema["properties"][part]["x-kubernetes-preserve-unknown-fields"]
                break
            schema = schema["properties"][part]
        else:
            assert schema["type"] == "string", field


def test_kustomize_is_told_of_every_image() -> None:
    (version,) = build_crd()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    config = yaml.safe_load(render_files()[Path("kustomize-config/inflight.yaml")])
    with_image = {f"spec/{name}/image" for name, section in spec.items() if "image" in section.get("properties", {})}
    assert {field["path"] for field in config["images"]} == with_image


def test_the_example_names_what_its_kustomization_makes() -> None:
    kustomization = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
    (generator,) = kustomization["configMapGenerator"]
    environment = load_job(EXAMPLE / "job.yaml").spec.environment
    assert environment.config_map == generator["name"]
    assert f"{environment.entrypoint.split(':')[0]}.py" in generator["files"]


@pytest.mark.parametrize(
    ("text", "finish", "value"),
    [
        ("12 times 34 is 408", "stop", 1.0),
        ("10 x 34 = 340, 2 x 34 = 68, so 1,408 - 1,000 = 408.", "stop", 1.0),
        ("408, or maybe 400", "stop", 0.0),
        ("no idea", "stop", 0.0),
        ("408", "length", 0.0),
    ],
)
def test_the_examples_environment_rewards_the_last_number(text: str, finish: str, value: float) -> None:
    spec = load_job(EXAMPLE / "job.yaml").spec.environment
    environment: Any = load_environment(
        EnvironmentSpec(entrypoint=spec.entrypoint, args=spec.args, search_path=(str(EXAMPLE),))
    )
    problems = [environment.problem(index) for index in range(50)]
    assert all(10 <= factor <= 99 for problem in problems for factor in problem)
    assert problems == [environment.problem(index) for index in range(50)]
    reward = environment.reward((12, 34), Answer(text, finish, ()))  # type: ignore[arg-type]
    assert reward == Reward(value, {"exact": value, "ended": float(finish == "stop")})
