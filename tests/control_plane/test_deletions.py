"""A job, its namespace or its CRD is deleted: everything goes, and nobody is in the way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from control_plane.cluster import Cluster, eventually, running_cluster
from control_plane.cluster.starting import CRDS
from control_plane.expected_refusals import refusals
from control_plane.jobs import Jobs, job, left
from control_plane.operator_process import Coordinators, OperatorProcess, operator_for, writes
from control_plane.snapshots import KINDS

CATCH_UP_S = 90.0


pytestmark = pytest.mark.usefixtures("only_expected_refusals")


def test_a_deleted_job_leaves_its_retained_claims_only(cluster: Cluster, jobs: Jobs, operator: OperatorProcess) -> None:
    jobs.create(job("a"), job("b", checkpoint={"onDelete": "Delete"}))
    for name in "ab":
        jobs.wait_phase(name, "Running")
    for one in jobs.kubectl.get(KINDS, "-n", jobs.namespace)["items"]:
        found = one["metadata"].get("finalizers", [])
        assert not [name for name in found if "inflight" in name or "kopf" in name], one["metadata"]["name"]
        notes = one["metadata"].get("annotations", {})
        assert not [name for name in notes if "kopf" in name or "zalando" in name]
    jobs.kubectl("delete", "rltj", "--all", "-n", jobs.namespace)
    for name in "ab":
        jobs.eventually(f"what {name} was made of is gone", lambda name=name: left(jobs, name) == [])
    jobs.eventually("only a's claim is left", lambda: claims(jobs) == ["persistentvolumeclaim/a-checkpoint"])
    assert claims(jobs) == ["persistentvolumeclaim/a-checkpoint"]
    # Nothing is done about what is left.
    since = cluster.audit.position()
    time.sleep(5)
    assert not writes(cluster.audit.events(since), operator)


def claims(jobs: Jobs) -> list[str]:
    return jobs.kubectl("get", "persistentvolumeclaims", "-n", jobs.namespace, "-o", "name").split()


def test_a_deleted_namespace_goes_and_is_not_fought_for(
    cluster: Cluster, namespace: str, coordinators: Coordinators, tmp_path: Path
) -> None:
    with (
        cluster.namespace() as doomed,
        operator_for(cluster, doomed, tmp_path / "operator", account_namespace=namespace) as operator,
    ):
        operator.start()
        jobs = Jobs(cluster.kubectl, doomed)
        # A namespace is looked at again only after half of what its slowest pod may take.
        quick = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 2}}}
        roles = dict.fromkeys(("coordinator", "inference", "actors", "trainer"), quick)
        jobs.create(*(job(name, **roles) for name in "abc"))
        for name in "abc":
            jobs.wait_phase(name, "Running", deadline_s=60)
        since = cluster.audit.position()
        cluster.kubectl("delete", "namespace", doomed, "--wait=false")

        def gone() -> bool:
            return not cluster.kubectl("get", "namespace", doomed, "--ignore-not-found", "-o", "name")

        # A kubelet tells how a pod ended before it lets it go, and Jobs wait to be told; kwok does not.
        for name in "abc":
            for pod in jobs.pods(name, "trainer"):
                told = '{"status": {"phase": "Failed"}}'
                where = ("-n", doomed, "--subresource=status", "--type=merge")
                cluster.kubectl("patch", f"pod/{pod['metadata']['name']}", *where, "-p", told)
        eventually("the namespace is gone", gone, 60)
        refused = [e for e in cluster.audit.events(since) if e.user == operator.user and e.code >= 400]
        sys.stdout.write(f"{len(refused)} refusals\n{operator.log}")
        assert len(refused) <= 3 * 30, "about one for each child, and a few more"
        since = cluster.audit.position()
        time.sleep(10)
        assert not writes(cluster.audit.events(since), operator)
        assert operator.running()


@pytest.mark.timeout(240, func_only=True)
def test_a_deleted_crd_takes_all_with_it_and_may_come_again(tmp_path: Path) -> None:
    crd = "crd/rltrainingjobs.inflight.dev"
    with running_cluster() as cluster, cluster.namespace() as namespace:
        jobs = Jobs(cluster.kubectl, namespace)
        with operator_for(cluster, namespace, tmp_path / "operator") as operator:
            operator.start()
            jobs.create(*(job(name) for name in "ab"))
            for name in "ab":
                jobs.wait_phase(name, "Running")
            operator.stop()
            cluster.kubectl("delete", crd)
            for name in "ab":
                eventually(f"what {name} was made of is gone", lambda name=name: remains(jobs, name) == [], 60)

            operator.start()
            eventually("it says what is missing", lambda: "apply crds/" in operator.log)
            install(cluster)
            jobs.create(job("c"))
            jobs.wait_phase("c", "Running")

            cluster.kubectl("delete", crd)
            eventually("what c was made of is gone", lambda: remains(jobs, "c") == [], 60)
            install(cluster)
            jobs.create(job("d"))
            jobs.wait_phase("d", "Running", deadline_s=CATCH_UP_S)
            assert operator.running()
            sys.stdout.write(operator.log)
            assert not refusals(cluster.audit.events(), [operator.user])


def remains(jobs: Jobs, name: str) -> list[str]:
    kinds = KINDS.replace("rltrainingjobs,", "").replace(",persistentvolumeclaims", "")
    return jobs.kubectl("get", kinds, "-n", jobs.namespace, "-l", f"inflight.dev/job={name}", "-o", "name").split()


def install(cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=create", "crd/rltrainingjobs.inflight.dev", "--timeout=20s")
    cluster.kubectl("wait", "--for=condition=Established", "crd/rltrainingjobs.inflight.dev", "--timeout=20s")
