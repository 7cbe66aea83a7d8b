"""The example on a real node: from ``kubectl apply -k`` to Succeeded."""

from __future__ import annotations

import pytest
from kubernetes import client

from cluster.images import Image
from cluster.installed import DEPLOYMENT, SYSTEM
from cluster.node import Node
from cluster.runs import NAME, apply_example, check_run, read_run
from control_plane.jobs import Jobs
from control_plane.watching import JobWatch

STARTS_S = 300.0
RUNS_S = 600.0
STEPS = 260

pytestmark = [pytest.mark.timeout(1200, func_only=True), pytest.mark.usefixtures("operator")]


def test_the_operator_is_its_own_image_under_its_own_account(node: Node) -> None:
    pods = node.kubectl.get("pods", "-n", SYSTEM)["items"]
    assert pods
    for pod in pods:
        assert pod["spec"]["serviceAccountName"] == DEPLOYMENT
        (container,) = pod["spec"]["containers"]
        assert container["image"].startswith("inflight-operator:")


def test_the_example_learns_from_apply_to_succeeded(
    node: Node, jobs: Jobs, admin: client.ApiClient, runtime: Image
) -> None:
    steps: list[int] = []
    rewards: list[float] = []

    def watch_progress(phase: str) -> bool:
        status = jobs.status(NAME)
        progress = status.get("progress") or {}
        if progress.get("step", 0) > (steps[-1] if steps else 0):
            steps.append(progress["step"])
            rewards.append(progress["rewardMean"])
        assert status.get("phase") != "Failed", status
        return status.get("phase") == phase

    with JobWatch(admin, jobs.namespace) as watched:
        apply_example(jobs)
        jobs.eventually("it runs", lambda: watch_progress("Running"), STARTS_S)
        jobs.eventually("it has succeeded", lambda: watch_progress("Succeeded"), RUNS_S)
        phases = ["Pending", "Starting", "Running", "Completing", "Succeeded"]
        jobs.eventually("each phase was seen", lambda: watched.phases[NAME] == phases)
        assert watched.wrong == []
    assert len(steps) >= 3
    assert steps[-1] == STEPS
    assert rewards[-1] > rewards[0]

    jobs.eventually(
        "no server and no actor is left", lambda: not jobs.pods(NAME, "inference") + jobs.pods(NAME, "actor")
    )
    check_run(read_run(node, jobs, runtime), STEPS)
