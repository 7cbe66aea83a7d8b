"""An operator that is killed at any moment leaves no trace of it."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from control_plane.cluster import Cluster, Kubectl, end_pods
from control_plane.jobs import Jobs, job, left
from control_plane.operator_process import Coordinators, OperatorProcess, operator_for, state
from control_plane.snapshots import differences, snapshot

KILLS = 20
LONGEST_WAIT_S = 1.2
"""An operator is killed within this time after each step: what it does about a step takes less."""


pytestmark = pytest.mark.usefixtures("only_expected_refusals")

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
