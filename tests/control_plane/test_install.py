"""The installation, judged by a real API server and by kubectl's own kustomize."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.cluster import Cluster, Kubectl, KubectlError, eventually

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
GITOPS = ROOT / "examples" / "gitops"
SYSTEM = "inflight-system"
OPERATOR = "inflight-operator"
JOB = ROOT / "examples" / "sort-letters" / "job.yaml"
REMOVAL_S = 90


def installed_pods_are_ready(kubectl: Kubectl, namespace: str) -> bool:
    """Whether Pod Security, the scheduler and the rest let both replicas run."""
    status = kubectl.get("deployment", OPERATOR, "-n", namespace).get("status", {})
    return bool(status.get("readyReplicas") == 2)


def allowed(kubectl: Kubectl, user: str, namespace: str, asked: list[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """What RBAC says to each verb on a ``plural.group:subresource/name``."""
    reviews = []
    for verb, resource in asked:
        plural, _, name = resource.partition("/")
        plural, _, subresource = plural.partition(":")
        plural, _, group = plural.partition(".")
        attributes = {"verb": verb, "resource": plural, "group": group, "namespace": namespace, "name": name}
        spec = {"user": user, "resourceAttributes": attributes | {"subresource": subresource}}
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    answers = kubectl.create(reviews, "-o", "jsonpath={.status.allowed}{' '}").split()
    return {question: answer == "true" for question, answer in zip(asked, answers, strict=True)}


def applied_again(kubectl: Kubectl, *arguments: str) -> None:
    """Apply what is there already, and assert that nothing of it changes.

    Of a PodDisruptionBudget kubectl says "configured" whatever was there before: it sends the selector every time.
    """
    before = written(kubectl, *arguments)
    said = kubectl("apply", "--warnings-as-errors", *arguments).splitlines()
    assert len(said) == len(before)
    others = [line for line in said if not line.startswith("poddisruptionbudget.policy/")]
    assert len(others) == len(said) - 1
    assert [line for line in others if not line.endswith(" unchanged")] == []
    assert written(kubectl, *arguments) == before


def written(kubectl: Kubectl, *arguments: str) -> list[dict[str, Any]]:
    """Objects without what controllers write."""
    found: list[dict[str, Any]] = kubectl.get(*arguments)["items"]
    for each in found:
        each.pop("status", None)
        del each["metadata"]["resourceVersion"]
        each["metadata"].get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
    return found


def account(namespace: str) -> str:
    return f"system:serviceaccount:{namespace}:{OPERATOR}"


@contextlib.contextmanager
def bound(kubectl: Kubectl, user: str, role: str, namespace: str) -> Iterator[None]:
    kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}", "-n", namespace)
    try:
        yield
    finally:
        kubectl("delete", "rolebinding", user, "-n", namespace)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Kubectl]:
    """Installed as the README says; every warning of the server is an error. Nothing of it is left afterwards."""
    kubectl = cluster.kubectl
    kubectl("apply", "-f", str(ROOT / "crds"))
    try:
        kubectl("apply", "--warnings-as-errors", "-k", str(MANIFESTS))
        yield kubectl
    finally:
        kubectl(
            *("delete", "-k", str(MANIFESTS), "--ignore-not-found", f"--timeout={REMOVAL_S}s"),
            deadline_s=REMOVAL_S + 10,
        )


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> str:
    """A namespace that enforces, and warns of, the restricted Pod Security Standard."""
    modes = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    cluster.kubectl("label", "namespace", namespace, *modes)
    return namespace


def test_installing_again_changes_nothing_and_leaves_the_lease_to_its_holder(installed: Kubectl) -> None:
    held = {"holderIdentity": "pod-1", "leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000000Z"}
    lease = ("lease", OPERATOR, "-n", SYSTEM)
    installed("patch", *lease, "--type=merge", "-p", json.dumps({"spec": held}))
    before = installed.get(*lease)
    crds = installed("apply", "-f", str(ROOT / "crds")).splitlines()
    assert [line for line in crds if not line.endswith(" unchanged")] == []
    applied_again(installed, "-k", str(MANIFESTS))
    assert installed.get(*lease) == before
    assert before["spec"] == held


def test_both_replicas_run_in_a_restricted_namespace(installed: Kubectl) -> None:
    eventually("two replicas are ready", lambda: installed_pods_are_ready(installed, SYSTEM))
    pods = installed.get("pods", "-n", SYSTEM)["items"]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2


def test_the_operator_may_do_what_it_needs_and_no_more(installed: Kubectl) -> None:
    needed = [
        ("watch", "rltrainingjobs.inflight.dev"),
        ("patch", "rltrainingjobs.inflight.dev:status/any"),
        ("update", "rltrainingjobs.inflight.dev:finalizers/any"),
        ("create", "jobsets.jobset.x-k8s.io"),
        ("patch", "statefulsets.apps/any"),
        ("delete", "persistentvolumeclaims/any"),
        ("get", "secrets/any"),
        ("list", "pods"),
        ("create", "events"),
    ]
    refused = [
        ("patch", "rltrainingjobs.inflight.dev/any"),
        ("delete", "rltrainingjobs.inflight.dev/any"),
        ("list", "secrets"),
        ("watch", "secrets"),
        ("patch", "secrets/any"),
        ("delete", "pods/any"),
        ("create", "pods:exec/any"),
        ("get", "leases.coordination.k8s.io/any"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("impersonate", "serviceaccounts/any"),
        ("create", "serviceaccounts:token/any"),
    ]
    answers = allowed(installed, account(SYSTEM), "default", needed + refused)
    assert [question for question in needed if not answers[question]] == []
    assert [question for question in refused if answers[question]] == []


def test_the_operator_may_write_its_own_lease_and_no_other(installed: Kubectl) -> None:
    lease, other = f"leases.coordination.k8s.io/{OPERATOR}", "leases.coordination.k8s.io/kube-scheduler"
    own, elsewhere = ([(verb, name) for verb in ("get", "patch")] for name in (lease, other))
    rest = [("update", lease), ("delete", lease), ("create", "leases.coordination.k8s.io")]
    answers = allowed(installed, account(SYSTEM), SYSTEM, [*own, *elsewhere, *rest])
    assert {question for question, answer in answers.items() if answer} == set(own)
    assert not any(allowed(installed, account(SYSTEM), "kube-system", own).values())


def test_the_operator_may_own_children_that_hold_their_job_back(installed: Kubectl, namespace: str) -> None:
    installed("apply", "-n", namespace, "-f", str(JOB))
    job = installed.get("rltj", "sort-letters", "-n", namespace)
    owner = {
        **{key: job[key] for key in ("apiVersion", "kind")},
        **{key: job["metadata"][key] for key in ("name", "uid")},
        **{"controller": True, "blockOwnerDeletion": True},
    }
    metadata = {"name": "child", "namespace": namespace, "ownerReferences": [owner]}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    installed.create([child], f"--as={account(SYSTEM)}")
    installed("delete", "configmap", "child", "-n", namespace, f"--as={account(SYSTEM)}")


def test_who_may_edit_a_namespace_may_make_jobs_there(installed: Kubectl, namespace: str) -> None:
    with bound(installed, "erin", "edit", namespace):
        may = [(verb, "rltrainingjobs.inflight.dev/any") for verb in ("create", "get", "patch", "delete")]
        may.append(("patch", "rltrainingjobs.inflight.dev:scale/any"))
        # The controller that adds roles to the built-in ones takes a moment.
        eventually("edit may", lambda: all(allowed(installed, "erin", namespace, may).values()))
        installed("apply", "-n", namespace, "-f", str(JOB), "--as=erin")
        assert not any(allowed(installed, "erin", "default", may).values())
        status = ("patch", "rltrainingjobs.inflight.dev:status/any")
        assert allowed(installed, "erin", namespace, [status]) == {status: False}


def test_who_may_view_a_namespace_may_see_jobs_and_make_none(installed: Kubectl, namespace: str) -> None:
    installed("apply", "-n", namespace, "-f", str(JOB))
    with bound(installed, "vera", "view", namespace):
        see = [("get", "rltrainingjobs.inflight.dev/any"), ("watch", "rltrainingjobs.inflight.dev")]
        eventually("view may", lambda: all(allowed(installed, "vera", namespace, see).values()))
        assert "sort-letters" in installed("get", "rltj", "-n", namespace, "--as=vera")
        with pytest.raises(KubectlError, match="forbidden"):
            installed("delete", "rltj", "sort-letters", "-n", namespace, "--as=vera")
        with pytest.raises(KubectlError, match="forbidden"):
            installed("create", "-n", namespace, "-f", str(GITOPS / "job.yaml"), "--as=vera")


def test_one_namespace_holds_all_of_a_namespaced_installation(cluster: Cluster, restricted: str) -> None:
    there = ("-n", restricted, "-k", str(MANIFESTS / "namespaced"))
    made = cluster.kubectl("apply", "--warnings-as-errors", *there)
    assert "clusterrole" not in made
    assert "namespace/" not in made
    applied_again(cluster.kubectl, *there)
    eventually("two replicas are ready", lambda: installed_pods_are_ready(cluster.kubectl, restricted))
    needed = [
        ("watch", "rltrainingjobs.inflight.dev"),
        ("create", "statefulsets.apps"),
        ("patch", f"leases.coordination.k8s.io/{OPERATOR}"),
    ]
    assert all(allowed(cluster.kubectl, account(restricted), restricted, needed).values())
    assert not any(allowed(cluster.kubectl, account(restricted), "default", needed).values())


@pytest.mark.parametrize("form", [".", "namespaced"])
def test_every_manifest_is_admitted_without_a_warning(cluster: Cluster, restricted: str, form: str) -> None:
    objects = list(yaml.safe_load_all(cluster.kubectl("kustomize", str(MANIFESTS / form))))
    for each in objects:
        each["metadata"].pop("namespace", None)
    dry = ("apply", "--dry-run=server", "--warnings-as-errors", "-n", restricted, "-f", "-")
    said = cluster.kubectl(*dry, stdin=yaml.safe_dump_all(objects)).splitlines()
    assert len(said) == len(objects)
    # The test can tell: a Deployment that says nothing of its security is warned of.
    with pytest.raises(KubectlError, match="would violate PodSecurity"):
        cluster.kubectl(
            *("create", "deployment", "careless", "--image=none", "-n", restricted),
            *("--dry-run=server", "--warnings-as-errors"),
        )


def test_the_readmes_kustomization_sets_namespace_images_and_registry(cluster: Cluster, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (MANIFESTS / "README.md").read_text(), flags=re.DOTALL)
    text = shown.replace("../manifests", os.path.relpath(MANIFESTS, tmp_path.resolve()))
    (tmp_path / "kustomization.yaml").write_text(text)
    objects = list(yaml.safe_load_all(cluster.kubectl("kustomize", str(tmp_path))))
    assert SYSTEM not in yaml.safe_dump(objects)
    found = {each["kind"]: each for each in objects}
    assert found["Namespace"]["metadata"]["name"] == "ml-platform"
    assert found["ClusterRoleBinding"]["subjects"][0]["namespace"] == "ml-platform"
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/ml/inflight-operator:")
    assert {"name": "INFLIGHT_REGISTRY", "value": "registry.example.com/ml"} in container["env"]


def rendered(kubectl: Kubectl, directory: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(kubectl("kustomize", str(directory)))}


def copied_example(target: Path) -> Path:
    """A copy of examples/gitops that still finds the component."""
    for file in GITOPS.iterdir():
        if file.is_file():
            component = os.path.relpath(MANIFESTS / "kustomize-config", target.resolve())
            (target / file.name).write_text(file.read_text().replace("../../manifests/kustomize-config", component))
    return target


def test_a_generated_config_map_reaches_the_job_under_its_hashed_name(cluster: Cluster, tmp_path: Path) -> None:
    found = rendered(cluster.kubectl, GITOPS)
    name = found["ConfigMap"]["metadata"]["name"]
    assert re.fullmatch(r"products-code-[a-z0-9]{10}", name)
    assert found["RLTrainingJob"]["spec"]["environment"]["configMap"] == name
    changed = copied_example(tmp_path)
    with (changed / "products.py").open("a") as code:
        code.write("# changed\n")
    other = rendered(cluster.kubectl, changed)["RLTrainingJob"]["spec"]["environment"]["configMap"]
    assert other.startswith("products-code-")
    assert other != name


@pytest.mark.parametrize(("example", "objects"), [("gitops", 2), ("sort-letters", 4)])
def test_an_example_is_accepted_twice(cluster: Cluster, namespace: str, example: str, objects: int) -> None:
    apply = ("apply", "-n", namespace, "-k", str(ROOT / "examples" / example))
    assert cluster.kubectl(*apply).count("created") == objects
    assert cluster.kubectl(*apply).count("unchanged") == objects


MORE = """
namePrefix: blue-
secretGenerator:
  - {name: hub, literals: [token=x]}
images:
  - {name: example.test/vllm, newName: mirror.test/vllm, newTag: "2"}
  - {name: example.test/sidecar, newTag: "3"}
patches:
  - patch: |-
      apiVersion: inflight.dev/v1alpha1
      kind: RLTrainingJob
      metadata: {name: products}
      spec:
        model: {tokenSecretRef: {name: hub}}
        checkpoint: {storage: null, claimName: results}
        actors: {image: "example.test/vllm:1"}
        trainer: {image: "example.test/vllm:1"}
        inference:
          image: example.test/vllm:1
          podTemplate:
            spec:
              containers:
                - {name: sidecar, image: "example.test/sidecar:1", envFrom: [{secretRef: {name: hub}}]}
              volumes:
                - {name: code, projected: {sources: [{configMap: {name: products-code}}]}}
"""
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: results}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
"""


def test_names_and_images_are_replaced_everywhere_in_a_job(cluster: Cluster, tmp_path: Path) -> None:
    directory = copied_example(tmp_path)
    (directory / "claim.yaml").write_text(CLAIM)
    kustomization = directory / "kustomization.yaml"
    kustomization.write_text(
        kustomization.read_text().replace("  - job.yaml\n", "  - job.yaml\n  - claim.yaml\n") + MORE
    )
    found = rendered(cluster.kubectl, directory)
    names = {kind: found[kind]["metadata"]["name"] for kind in ("ConfigMap", "Secret")}
    assert all(name.startswith("blue-") for name in names.values())
    spec = found["RLTrainingJob"]["spec"]
    assert spec["model"]["tokenSecretRef"]["name"] == names["Secret"]
    assert spec["checkpoint"]["claimName"] == "blue-results"
    assert {spec[role]["image"] for role in ("inference", "actors", "trainer")} == {"mirror.test/vllm:2"}
    pod = spec["inference"]["podTemplate"]["spec"]
    (sidecar,) = pod["containers"]
    assert sidecar["image"] == "example.test/sidecar:3"
    assert sidecar["envFrom"] == [{"secretRef": {"name": names["Secret"]}}]
    assert pod["volumes"][0]["projected"]["sources"] == [{"configMap": {"name": names["ConfigMap"]}}]
