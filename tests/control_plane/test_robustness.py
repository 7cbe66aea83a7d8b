"""Crashes, several operators, a link that is cut, deletions, and rest: what the operator must live through."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.cluster import AuditEvent, Cluster, Kubectl, end_pods, eventually, running_cluster
from control_plane.cluster.cluster import CRDS
from control_plane.expected_refusals import refusals
from control_plane.jobs import Jobs, job
from control_plane.links import Link
from control_plane.operator_process import ROOT, Coordinators, OperatorProcess, operator_for, state
from control_plane.snapshots import KINDS, differences, snapshot

KILLS = 20
LONGEST_WAIT_S = 1.2
"""An operator is killed within this time after each step: what it does about a step takes less."""
TAKE_OVER_S = 20.0
STOPPED_S = 30.0
CUT_S = 120.0
"""Longer than any deadline of the operator's: 20 s for a call, 60 s for a reconcile, 70 s for a silent watch."""
CATCH_UP_S = 90.0
REST_S = 60.0


pytestmark = pytest.mark.usefixtures("only_expected_refusals")


# --- crashes ----------------------------------------------------------------------------------------------------------

Step = tuple[str, Callable[[], Any], Callable[[], Any]]
"""What is done, how, and how it is told that the operator has done its part."""


def script(jobs: Jobs, states: dict[str, dict[str, Any]]) -> list[Step]:
    """What users do in a namespace, one thing after the other."""
    lasting = {"lifecycle": {"onFailure": "delete"}, "trainer": {"maxRestarts": 0}}
    for name in "abcde":
        states[f"{jobs.namespace}/{name}"] = state(step=5)
    mortal = {"checkpoint": {"onDelete": "Delete"}}

    def phase(name: str, wanted: str) -> Callable[[], Any]:
        return lambda: jobs.eventually(f"{name} is {wanted}", lambda: _settled(jobs, name, wanted), 60)

    def patch(name: str, spec: dict[str, Any]) -> Callable[[], Any]:
        return lambda: jobs.patch(name, spec)

    def anew(what: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        before: list[str] = []

        def delete() -> None:
            before.append((jobs.child(what) or {})["metadata"]["uid"])
            jobs.kubectl("delete", what, "-n", jobs.namespace)

        def there() -> bool:
            found = jobs.child(what)
            return found is not None and found["metadata"]["uid"] != before[0]

        return delete, lambda: jobs.eventually(f"{what} is made anew", there, 60)

    def edited() -> None:
        body = (
            '{"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}, "metadata": {"labels": {"a": "b"}}}'
        )
        jobs.kubectl("patch", "deployment/b-actor", "-n", jobs.namespace, "--type=merge", "-p", body)

    def mended() -> bool:
        found = jobs.child("deployment/b-actor")
        assert found is not None
        return bool(found["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") != 7)

    def end(name: str, code: int) -> Callable[[], Any]:
        selector = f"inflight.dev/job={name},inflight.dev/role=trainer"
        return lambda: end_pods(jobs.kubectl, jobs.namespace, selector, code)

    def gone(name: str) -> Callable[[], Any]:
        return lambda: jobs.eventually(f"what {name} was made of is gone", lambda: left(jobs, name) == [], 60)

    def delete(name: str) -> Callable[[], Any]:
        return lambda: jobs.kubectl("delete", f"rltj/{name}", "-n", jobs.namespace)

    def scaled(name: str, role: str, count: int) -> Callable[[], Any]:
        return lambda: jobs.eventually(f"{count} of {role}", lambda: jobs.status(name)[role].get("ready") == count, 60)

    return [
        ("create a", lambda: jobs.create(job("a", **mortal)), phase("a", "Running")),
        ("create b suspended", lambda: jobs.create(job("b", suspend=True)), phase("b", "Suspended")),
        ("resume b", patch("b", {"suspend": False}), phase("b", "Running")),
        ("suspend a", patch("a", {"suspend": True}), phase("a", "Suspended")),
        ("more servers in a", patch("a", {"inference": {"replicas": 3}}), phase("a", "Suspended")),
        ("resume a", patch("a", {"suspend": False}), phase("a", "Running")),
        ("more actors in b", patch("b", {"actors": {"replicas": 2}}), scaled("b", "actors", 2)),
        ("create c", lambda: jobs.create(job("c", **mortal)), phase("c", "Running")),
        ("c's trainer is done", end("c", 0), phase("c", "Succeeded")),
        ("b's service is deleted", *anew("service/b-inference")),
        ("b's coordinator is deleted", *anew("statefulset/b-coordinator")),
        ("create d", lambda: jobs.create(job("d", **lasting)), phase("d", "Running")),
        ("d's trainer fails", end("d", 1), phase("d", "Failed")),
        ("delete a", delete("a"), gone("a")),
        ("create a again", lambda: jobs.create(job("a", **mortal)), phase("a", "Running")),
        ("edit b's actors by hand", edited, lambda: jobs.eventually("it is mended", mended, 60)),
        ("delete c", delete("c"), gone("c")),
        ("delete d", delete("d"), gone("d")),
        ("suspend b", patch("b", {"suspend": True}), phase("b", "Suspended")),
        ("resume b again", patch("b", {"suspend": False}), phase("b", "Running")),
    ]


def _settled(jobs: Jobs, name: str, wanted: str) -> bool:
    found = jobs.get(name)
    status = found.get("status", {})
    return status.get("phase") == wanted and status.get("observedGeneration") == found["metadata"]["generation"]


def left(jobs: Jobs, name: str) -> list[str]:
    """What is left of a job, claims apart."""
    kinds = KINDS.replace(",persistentvolumeclaims", "")
    return jobs.kubectl("get", kinds, "-n", jobs.namespace, "-l", f"inflight.dev/job={name}", "-o", "name").split()


def play(steps: list[Step], disturb: Callable[[int], None]) -> None:
    for number, (what, act, wait) in enumerate(steps):
        act()
        disturb(number)
        try:
            wait()
        except Exception as error:
            raise AssertionError(f"after step {number}, {what}: {error}") from error


def still(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """The state of a namespace once it does not change any more."""
    last = snapshot(kubectl, namespace)
    began = since = time.monotonic()
    while time.monotonic() - since < 3.0:
        assert time.monotonic() - began < 60
        time.sleep(0.5)
        now = snapshot(kubectl, namespace)
        if now != last:
            last, since = now, time.monotonic()
    return last


@pytest.mark.timeout(600, func_only=True)
def test_twenty_crashes_leave_no_trace(cluster: Cluster, coordinators: Coordinators, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    dice = random.Random(seed)

    def run(namespace: str, operator: OperatorProcess, crashes: bool) -> dict[str, Any]:
        steps = script(Jobs(cluster.kubectl, namespace), coordinators.states)
        kills = 0

        def disturb(number: int) -> None:
            nonlocal kills
            # Now and then a second time, while it is starting.
            for _ in range(1 + (number % 4 == 0)) if crashes else ():
                time.sleep(dice.uniform(0.0, LONGEST_WAIT_S))
                operator.kill()
                operator.start()
                kills += 1

        operator.start()
        operator.wait_watching()
        play(steps, disturb)
        assert kills >= (KILLS if crashes else 0)
        return still(cluster.kubectl, namespace)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        runs = []
        for name, crashes in (("calm", False), ("rough", True)):
            namespace = stack.enter_context(cluster.namespace())
            operator = stack.enter_context(
                operator_for(
                    cluster,
                    namespace,
                    tmp_path / name,
                    account_namespace="default",
                    coordinator_url=coordinators.url,
                )
            )
            runs.append(pool.submit(run, namespace, operator, crashes))
        calm, rough = (run.result() for run in runs)
    assert "RLTrainingJob/a" in calm
    assert not (lines := differences(calm, rough)), "\n".join(lines)


# --- several operators ------------------------------------------------------------------------------------------------


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


def writes(events: list[AuditEvent], operator: OperatorProcess) -> list[AuditEvent]:
    """What an operator wrote, its Lease apart."""
    return [one for one in events if one.user == operator.user and one.is_write and one.resource != "leases"]


def assert_one_after_the_other(events: list[AuditEvent], one: OperatorProcess, two: OperatorProcess) -> None:
    """Nothing that the first wrote comes after the second held the Lease, and nothing of the second before."""
    taken = [e for e in events if e.user == two.user and e.resource == "leases" and e.verb == "patch" and e.code == 200]
    before, after = writes(events, one), writes(events, two)
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


def test_a_leader_that_was_stopped_for_a_while_writes_nothing_more(
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


# --- the link to the API server ---------------------------------------------------------------------------------------


@pytest.mark.timeout(420, func_only=True)
def test_what_happened_while_the_link_was_cut_is_made_up_for(
    cluster: Cluster, jobs: Jobs, coordinators: Coordinators, tmp_path: Path
) -> None:
    server = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    with (
        Link(server) as link,
        operator_for(
            cluster, jobs.namespace, tmp_path / "operator", server=link.url, coordinator_url=coordinators.url
        ) as operator,
    ):
        operator.start()
        jobs.create(job("stays"), job("goes"))
        for name in ("stays", "goes"):
            jobs.wait_phase(name, "Running")
        jobs.eventually("both are counted", lambda: operator.metrics()['inflight_jobs{phase="Running"}'] == 2)

        link.cut()
        cut = time.monotonic()
        jobs.kubectl("delete", "rltj/goes", "-n", jobs.namespace)
        jobs.kubectl("delete", "service/stays-inference", "statefulset/stays-inference", "-n", jobs.namespace)
        jobs.create(job("comes"))
        # Nobody else may do it, and it may not do it by another way.
        while time.monotonic() < cut + CUT_S:
            assert jobs.child("service/stays-inference") is None
            assert operator.running()
            time.sleep(5)
        link.mend()
        mended = time.monotonic()
        jobs.wait_phase("comes", "Running", deadline_s=CATCH_UP_S)
        jobs.eventually(
            "what was deleted by hand is back",
            lambda: all(map(jobs.child, ("service/stays-inference", "statefulset/stays-inference"))),
            mended + CATCH_UP_S - time.monotonic(),
        )
        jobs.eventually(
            "the deleted job is not counted any more",
            lambda: operator.metrics()['inflight_jobs{phase="Running"}'] == 2,
            mended + CATCH_UP_S - time.monotonic(),
        )
        sys.stdout.write(f"caught up {time.monotonic() - mended:.1f} s after the link was back\n{operator.log}")


# --- deletions --------------------------------------------------------------------------------------------------------


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


# --- rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300, func_only=True)
def test_at_rest_nothing_is_written(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators
) -> None:
    names = [f"j{number}" for number in range(8)]
    jobs.create(*map(job, names), job("asleep", suspend=True))
    for name in names:
        jobs.wait_phase(name, "Running", deadline_s=60)
        jobs.wait_reason(name, "CoordinatorReachable", "Unreachable")
    jobs.wait_phase("asleep", "Suspended")
    assert not at_rest(cluster, operator)
    since = cluster.audit.position()
    operator.kill()
    operator.start()
    operator.wait_watching()
    assert not at_rest(cluster, operator)
    assert not writes(cluster.audit.events(since), operator), "a restart is no news either"


def at_rest(cluster: Cluster, operator: OperatorProcess) -> list[str]:
    """What is written in a minute, beginning once nothing has been written for three seconds."""

    def quiet() -> bool:
        since = cluster.audit.position()
        time.sleep(3)
        return not writes(cluster.audit.events(since), operator)

    eventually("the operator comes to rest", quiet, 30)
    since = cluster.audit.position()
    time.sleep(REST_S)
    return [f"{event.verb} {event.resource} {event.name}" for event in writes(cluster.audit.events(since), operator)]
