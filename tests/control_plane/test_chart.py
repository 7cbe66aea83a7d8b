"""The Helm chart: rendered by helm, held against kustomize's form of the same, installed on a real API server."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.cluster import Cluster, Kubectl, ensure_program, eventually
from control_plane.helm import Helm, HelmError
from inflight_operator import names
from inflight_operator.builders import actors, coordinator, inference
from inflight_operator.settings import Settings, settings_from

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "inflight"
MANIFESTS = ROOT / "manifests"
JOB = ROOT / "examples" / "sort-letters" / "job.yaml"
SYSTEM = "inflight-system"
OPERATOR = "inflight-operator"
CRD = "rltrainingjobs.inflight.dev"
COLUMN = "State of the run in one word"
OLDER = "As an older release had it"
TAKE_OVER = ("--take-ownership", "--force-conflicts")
"""The README's words for what somebody else has applied; the tests' cluster has crds/ applied by kubectl."""

DIGEST = "sha256:" + "0123456789abcdef" * 4
EVERYTHING: dict[str, Any] = {
    "registry": "registry.example.com:5000/ml/",
    "image": {"repository": "our/operator", "tag": "2.0", "digest": DIGEST, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "hub"}],
    "replicas": 3,
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "1Gi"}},
    "runAs": 1000660000,
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "important",
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "podLabels": {"team": "ml", "app.kubernetes.io/name": "not-ours"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}],
    "podDisruptionBudget": {"enabled": False},
    "podMonitor": {"enabled": True, "jobs": True, "interval": "1m", "labels": {"release": "prometheus"}},
    "settings": {
        "workers": 100,
        "logLevel": "DEBUG",
        "logFormat": "text",
        "coordinatorImage": "c:1",
        "inferenceImage": "i:1",
        "actorImage": "a:1",
        "trainerImage": "t:1",
        "imagePullSecrets": [{"name": "hub"}, {"name": "mirror"}],
        "scrapeFrom": {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}},
        "storageClass": "fast",
        "modelStorage": "1Ti",
        "modelAccessMode": "ReadWriteOnce",
        "gpuResource": "amd.com/gpu",
        "shmSize": "16Gi",
        "coordinatorStartupSeconds": 20,
        "inferenceStartupSeconds": 5_000_000,
        "actorStartupSeconds": 30,
    },
}
"""A value for each that is not its default."""


@pytest.fixture(scope="module")
def helm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(ensure_program("helm"), cluster.kubeconfig, tmp_path_factory.mktemp("helm"))


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A file with all values."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING))
    return path


@pytest.fixture
def system(cluster: Cluster, helm: Helm) -> Iterator[str]:
    """Namespace of a release, which is gone afterwards, all but the definition."""
    with cluster.namespace() as name:
        try:
            yield name
        finally:
            helm("uninstall", "inflight", "--namespace", name, "--ignore-not-found")


def by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = by_name(documents)["Deployment", OPERATOR]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def git(*arguments: str) -> bytes:
    """What git says; nothing where there is no git or no such commit."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        return b""
    return done.stdout if done.returncode == 0 else b""


def older_chart(directory: Path) -> Path:
    """The chart before its last change, as far back as this clone goes; its definition is another one in any case."""
    commits = git("log", "-2", "--format=%H", "--", "charts/inflight").decode().split()
    changed = git("status", "--porcelain", "--", "charts/inflight")
    commit = commits[0 if changed else -1] if commits else ""
    files = git("ls-tree", "-r", "--name-only", commit, "charts/inflight").decode().split() if commit else []
    contents = {name: git("show", f"{commit}:{name}") for name in files} or {
        str(path.relative_to(ROOT)): path.read_bytes() for path in CHART.rglob("*") if path.is_file()
    }
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (definition,) = [path for path in directory.rglob("*.yaml") if "kind: CustomResourceDef" in path.read_text()]
    text = definition.read_text()
    assert COLUMN in text
    definition.write_text(text.replace(COLUMN, OLDER))
    return directory / "charts" / "inflight"


def columns(kubectl: Kubectl) -> str:
    return kubectl("get", "crd", CRD, "-o", "jsonpath={.spec.versions[*].additionalPrinterColumns[*].description}")


def test_it_passes_lint_with_its_defaults_and_with_every_value(helm: Helm, everything: Path) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART))
    helm("lint", "--strict", str(CHART), "--values", str(everything))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("imgae.tag=1", r"at '': additional properties 'imgae' not allowed"),
        ("settings.log_level=DEBUG", r"at '/settings': additional properties 'log_level' not allowed"),
        ("settings.logLevel=TRACE", r"at '/settings/logLevel': value must be one of 'DEBUG', 'INFO'"),
        ("settings.workers=0", r"at '/settings/workers': minimum: got 0, want 1"),
        ("settings.scrapeFrom.labels.app=x", r"at '/settings/scrapeFrom': additional properties 'labels' not allowed"),
        ("replicas=two", r"at '/replicas': got string, want integer"),
        ("image.digest=latest", r"at '/image/digest': 'latest' does not match pattern"),
        ("registry=https://registry.example.com", r"at '/registry': .* does not match pattern"),
        ("imagePullSecrets[0]=hub", r"at '/imagePullSecrets/0': got string, want object"),
        ("runAs=root", r"at '/runAs': value must be 'none'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(helm: Helm, value: str, message: str) -> None:
    with pytest.raises(HelmError, match=message):
        helm.template(CHART, SYSTEM, "--set", value)


def test_for_the_whole_cluster_it_is_what_kustomize_gives(cluster: Cluster, helm: Helm) -> None:
    expected = by_name(list(yaml.safe_load_all(cluster.kubectl("kustomize", str(MANIFESTS)))))
    found = by_name(helm.template(CHART, SYSTEM))
    definition = found.pop(("CustomResourceDefinition", CRD))
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    del expected["Namespace", SYSTEM]
    assert found == expected


def test_for_one_namespace_it_is_what_kustomize_gives(cluster: Cluster, helm: Helm) -> None:
    expected = by_name(list(yaml.safe_load_all(cluster.kubectl("kustomize", str(MANIFESTS / "namespaced")))))
    found = by_name(helm.template(CHART, "team-a", "--set", "oneNamespace=true", "--set", "crds.install=false"))
    for each in found.values():
        # Kustomize leaves the namespace to kubectl.
        assert each["metadata"].pop("namespace") == "team-a"
        for subject in each.get("subjects", []):
            assert subject.pop("namespace") == "team-a"
    # The order of variables does not matter.
    for documents in (found, expected):
        container([*documents.values()])["env"].sort(key=lambda variable: variable["name"])
    assert found == expected


def test_every_value_arrives(helm: Helm, everything: Path) -> None:
    documents = helm.template(CHART, SYSTEM, "--values", str(everything))
    found = by_name(documents)
    deployment = found["Deployment", OPERATOR]["spec"]
    template, pod = deployment["template"], deployment["template"]["spec"]
    assert deployment["replicas"] == 3
    assert template["metadata"]["labels"] == {**deployment["selector"]["matchLabels"], "team": "ml"}
    assert template["metadata"]["annotations"] == EVERYTHING["podAnnotations"]
    for name in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[name] == EVERYTHING[name]
    assert {pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {1000660000}
    operator = container(documents)
    assert operator["image"] == f"registry.example.com:5000/ml/our/operator@{DIGEST}"
    assert operator["imagePullPolicy"] == "Always"
    assert operator["resources"] == EVERYTHING["resources"]
    assert EVERYTHING["extraEnv"][0] in operator["env"]
    assert ("PodDisruptionBudget", OPERATOR) not in found


def test_pods_are_monitored_when_asked(helm: Helm, everything: Path) -> None:
    assert not [each for each in helm.template(CHART, SYSTEM) if each["kind"] == "PodMonitor"]
    found = by_name(helm.template(CHART, SYSTEM, "--values", str(everything)))
    own, jobs = found["PodMonitor", OPERATOR], found["PodMonitor", "inflight-jobs"]
    assert {each["metadata"]["labels"]["release"] for each in (own, jobs)} == {"prometheus"}
    assert own["spec"]["selector"] == found["Deployment", OPERATOR]["spec"]["selector"]
    port = container([*found.values()])["ports"][0]["name"]
    assert own["spec"]["podMetricsEndpoints"] == [{"port": port, "path": "/metrics", "interval": "1m"}]
    assert jobs["spec"]["namespaceSelector"] == {"any": True}
    selected = jobs["spec"]["selector"]["matchLabels"].items()
    assert selected <= names.labels("j", names.ACTOR).items()
    assert not selected <= own["spec"]["selector"]["matchLabels"].items()
    ports = {coordinator.PORT_NAME, inference.PORT_NAME, actors.PORT_NAME}
    assert {endpoint["port"] for endpoint in jobs["spec"]["podMetricsEndpoints"]} == ports


def test_the_operator_reads_what_the_values_say(helm: Helm, everything: Path) -> None:
    env = container(helm.template(CHART, SYSTEM, "--values", str(everything)))["env"]
    settings = settings_from({one["name"]: one.get("value", SYSTEM) for one in env})
    given = EVERYTHING["settings"]
    assert settings == Settings(
        operator_namespace=SYSTEM,
        lease_namespace=SYSTEM,
        registry=EVERYTHING["registry"],
        run_as=EVERYTHING["runAs"],
        workers=given["workers"],
        log_level=given["logLevel"],
        log_format=given["logFormat"],
        coordinator_image=given["coordinatorImage"],
        inference_image=given["inferenceImage"],
        actor_image=given["actorImage"],
        trainer_image=given["trainerImage"],
        image_pull_secrets=("hub", "mirror"),
        scrape_from=given["scrapeFrom"],
        storage_class=given["storageClass"],
        model_storage=given["modelStorage"],
        model_access_mode=given["modelAccessMode"],
        gpu_resource=given["gpuResource"],
        shm_size=given["shmSize"],
        coordinator_startup_s=given["coordinatorStartupSeconds"],
        inference_startup_s=given["inferenceStartupSeconds"],
        actor_startup_s=given["actorStartupSeconds"],
    )


def test_on_openshift_the_cluster_chooses_the_users(helm: Helm) -> None:
    documents = helm.template(CHART, SYSTEM, "--set", "runAs=none")
    pod = by_name(documents)["Deployment", OPERATOR]["spec"]["template"]["spec"]
    assert set(pod["securityContext"]) == {"runAsNonRoot", "seccompProfile"}
    assert {"name": "INFLIGHT_RUN_AS", "value": "none"} in container(documents)["env"]


def test_every_object_is_admitted_without_a_warning(
    cluster: Cluster, helm: Helm, namespace: str, everything: Path
) -> None:
    modes = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    cluster.kubectl("label", "namespace", namespace, *modes)
    for arguments in (("--values", str(everything)), ("--set", "oneNamespace=true,crds.install=false")):
        # The tests' cluster has no Prometheus operator.
        documents = [each for each in helm.template(CHART, namespace, *arguments) if each["kind"] != "PodMonitor"]
        said = cluster.kubectl(
            *("apply", "--dry-run=server", "--server-side", "--force-conflicts", "--warnings-as-errors", "-f", "-"),
            stdin=yaml.safe_dump_all(documents),
        )
        assert len(said.splitlines()) == len(documents)


def test_the_notes_name_the_next_commands(helm: Helm) -> None:
    said = helm("install", "inflight", str(CHART), "--namespace", SYSTEM, "--dry-run=client")
    notes = said.partition("NOTES:")[2]
    assert "kubectl rollout status deployment/inflight-operator -n inflight-system" in notes
    assert "kubectl apply -f job.yaml" in notes
    # Without a cluster helm knows of no JobSet.
    assert "JobSet is missing" in notes
    said = helm(
        *("install", "inflight", str(CHART), "--namespace", "team-a", "--dry-run=server"),
        *("--set", "oneNamespace=true,crds.install=false"),
    )
    notes = said.partition("NOTES:")[2]
    assert "kubectl apply -f job.yaml -n team-a" in notes
    assert "kubectl apply -f crds/" in notes
    assert "JobSet is missing" not in notes


def test_a_release_upgrades_the_definition_and_leaves_it_with_the_jobs_when_it_goes(
    cluster: Cluster, helm: Helm, system: str, namespace: str, tmp_path: Path
) -> None:
    kubectl, release = cluster.kubectl, ("--namespace", system)
    helm("install", "inflight", str(older_chart(tmp_path)), *release, *TAKE_OVER)
    assert OLDER in columns(kubectl)
    kubectl("apply", "-n", namespace, "-f", str(JOB))
    said = helm("upgrade", "inflight", str(CHART), *release)
    assert "JobSet is missing" not in said
    assert COLUMN in columns(kubectl)
    assert OLDER not in columns(kubectl)

    def ready() -> bool:
        return bool(kubectl.get("deployment", OPERATOR, "-n", system).get("status", {}).get("readyReplicas") == 2)

    eventually("two replicas are ready", ready)
    helm("uninstall", "inflight", *release)
    assert kubectl("get", "deployments,roles,leases,serviceaccounts", "-n", system, "-o", "name").split() == [
        "serviceaccount/default"
    ]
    assert "clusterrole" not in kubectl("get", "clusterroles", "-l", "app.kubernetes.io/name=inflight", "-o", "name")
    assert kubectl.get("rltj", "sort-letters", "-n", namespace)["spec"]["algorithm"]["steps"] == 260
    # The definition that it has left is its own to the next release of the name.
    helm("install", "inflight", str(CHART), *release)


def test_the_commands_of_the_readme_are_understood(helm: Helm) -> None:
    text = (CHART / "README.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    installs = [shlex.split(line)[1:] for line in lines if line.startswith("helm") and "install" in line]
    assert len(installs) == 3
    for arguments in installs:
        helm(*arguments, "--dry-run=client", cwd=ROOT)
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    sets = yaml.safe_load(shown)
    assert set(sets) == {"registry", "imagePullSecrets", "settings"}
