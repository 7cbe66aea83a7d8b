"""Of two operators one acts, and the other takes over."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from control_plane.cluster import AuditEvent, Cluster, eventually
from control_plane.jobs import Jobs, job
from control_plane.operator_process import ROOT, OperatorProcess, operator_for, writes

TAKE_OVER_S = 20.0
STOPPED_S = 30.0


pytestmark = pytest.mark.usefixtures("only_expected_refusals")


@contextlib.contextmanager
def pair(cluster: Cluster, namespace: str, directory: Path) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """Two operators, running; the first holds the Lease."""
    lease = yaml.safe_load((ROOT / "manifests/base/lease.yaml").read_text())
    role = yaml.safe_load((ROOT / "manifests/base/role.yaml").read_text())
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": role["metadata"]["name"]},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
        "subjects": [
            {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Group",
                "name": f"system:serviceaccounts:{namespace}",
            }
        ],
    }
    cluster.kubectl.create([lease, role, binding], "-n", namespace)
    with (
        operator_for(cluster, namespace, directory / "one", lease_namespace=namespace) as one,
        operator_for(cluster, namespace, directory / "two", lease_namespace=namespace) as two,
    ):
        one.start()
        eventually("the first holds the Lease", lambda: "now holds Lease" in one.log)
        two.start()
        eventually("the second waits", lambda: "Waiting: " in two.log)
        yield one, two
        sys.stdout.write(f"{one.log}\n{two.log}")


def assert_one_after_the_other(events: list[AuditEvent], one: OperatorProcess, two: OperatorProcess) -> None:
    """Nothing that the first changed comes after the second held the Lease, and nothing of the second before."""
    taken = [e for e in events if e.user == two.user and e.resource == "leases" and e.verb == "patch" and e.code == 200]
    before, after = ([e for e in writes(events, each) if e.code < 300] for each in (one, two))
    assert before and after and taken
    assert max(event.received for event in before) < taken[0].answered
    assert min(event.received for event in after) > taken[0].received


def test_another_one_acts_when_the_leader_has_crashed(cluster: Cluster, jobs: Jobs, tmp_path: Path) -> None:
    since = cluster.audit.position()
    with pair(cluster, jobs.namespace, tmp_path) as (one, two):
        jobs.create(job("a"))
        jobs.eventually("half of a is there", lambda: jobs.child("service/a-inference"))
        one.kill()
        killed = time.time()
        jobs.create(job("b"))
        for name in "ab":
            jobs.wait_phase(name, "Running", deadline_s=TAKE_OVER_S + 20)
        events = cluster.audit.events(since)
        assert_one_after_the_other(events, one, two)
        assert min(event.received for event in writes(events, two)) - killed <= TAKE_OVER_S


def test_a_leader_that_was_stopped_for_a_while_changes_nothing_more(
    cluster: Cluster, jobs: Jobs, tmp_path: Path
) -> None:
    since = cluster.audit.position()
    with pair(cluster, jobs.namespace, tmp_path) as (one, two):
        jobs.create(job("a"))
        jobs.wait_phase("a", "Running")
        # Cheaper to be in the middle of something with many than with one.
        jobs.create(*(job(f"b{number}") for number in range(5)))
        jobs.eventually("the first is at work", lambda: jobs.child("serviceaccount/b0-account"))
        one.pause()
        paused = time.time()
        jobs.patch("a", {"suspend": True})
        for number in range(5):
            jobs.wait_phase(f"b{number}", "Running", deadline_s=TAKE_OVER_S + 30)
        jobs.wait_phase("a", "Suspended")
        time.sleep(max(0.0, paused + STOPPED_S - time.time()))
        one.go_on()
        assert one.wait_ended() == 1
        assert_one_after_the_other(cluster.audit.events(since), one, two)
        jobs.patch("a", {"suspend": False})
        jobs.wait_phase("a", "Running")


def test_a_leader_that_ends_hands_over_at_once(cluster: Cluster, jobs: Jobs, tmp_path: Path) -> None:
    since = cluster.audit.position()
    with pair(cluster, jobs.namespace, tmp_path) as (one, two):
        jobs.create(job("a"))
        jobs.wait_phase("a", "Running")
        asked = time.time()
        assert one.stop() == 0
        jobs.create(job("b"))
        jobs.wait_phase("b", "Running")
        events = cluster.audit.events(since)
        assert_one_after_the_other(events, one, two)
        assert min(event.received for event in writes(events, two)) - asked <= 5.0
