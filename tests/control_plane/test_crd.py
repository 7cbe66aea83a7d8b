"""The generated CRD and the examples, judged by a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes import client

from control_plane.cluster import Cluster
from inflight_operator.crd import UNSEEN

ROOT = Path(__file__).resolve().parents[2]
NAME = "rltrainingjobs.inflight.dev"


def test_the_crd_is_established_and_structural(cluster: Cluster, admin: client.ApiClient) -> None:
    assert not cluster.refused_crds
    status = client.ApiextensionsV1Api(admin).read_custom_resource_definition(NAME).status
    assert status is not None
    conditions = {condition.type: condition.status for condition in status.conditions or []}
    assert conditions["Established"] == "True"
    assert conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_the_crd_can_be_applied_again(cluster: Cluster) -> None:
    # Client-side apply keeps the whole object in an annotation, which has a limit.
    lines = cluster.kubectl("apply", "-f", str(ROOT / "crds")).splitlines()
    assert lines
    assert all(line.endswith("unchanged") for line in lines)


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*/job.yaml")), ids=lambda path: path.parent.name)
def test_examples_are_accepted_twice(cluster: Cluster, namespace: str, example: Path) -> None:
    first, second = (cluster.kubectl("apply", "-n", namespace, "-f", str(example)) for _ in range(2))
    assert first.strip().endswith("created")
    assert second.strip().endswith("unchanged")


def test_the_short_name_and_the_category_work(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / "sort-letters" / "job.yaml"))
    for asked in ("rltj", "all"):
        assert "rltrainingjob.inflight.dev/sort-letters" in cluster.kubectl("get", asked, "-n", namespace, "-o", "name")


def test_a_job_that_no_operator_has_seen_does_not_pass_for_a_finished_one(cluster: Cluster, namespace: str) -> None:
    # kstatus (Flux, helm --wait) goes by this number, and calls an object without any status current.
    cluster.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / "sort-letters" / "job.yaml"))
    job = cluster.kubectl.get("rltj", "sort-letters", "-n", namespace)
    assert job["status"] == UNSEEN
    assert job["metadata"]["generation"] == 1
