"""Pods of every role are deleted in the middle of a run on vLLM, and it succeeds all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.images import Image
from cluster.installed import DEPLOYMENT, SYSTEM
from cluster.node import Node
from cluster.pods import lives
from cluster.runs import NAME, apply_example, check_run, read_run, step, wait_step
from control_plane.jobs import Jobs

STEPS = 400
STARTS_S = 300.0
COMES_BACK_S = 240.0

pytestmark = [pytest.mark.timeout(1500, func_only=True), pytest.mark.usefixtures("operator")]


def only(pods: list[dict[str, Any]]) -> dict[str, Any]:
    (pod,) = [pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    return pod


def name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def ready(pod: dict[str, Any]) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def counted_restarts(jobs: Jobs) -> int:
    """Restarts of the trainer that count against ``maxRestarts``."""
    return int(jobs.there(f"jobset/{NAME}-t")["status"].get("restartsCountTowardsMax", 0))


def evict(jobs: Jobs, pod: str) -> None:
    """What a drain does to a pod."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": jobs.namespace}}
    path = f"/api/v1/namespaces/{jobs.namespace}/pods/{pod}/eviction"
    jobs.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def test_a_run_survives_the_loss_of_each_of_its_pods(node: Node, jobs: Jobs, runtime: Image, tmp_path: Path) -> None:
    def delete(pod: str, namespace: str = jobs.namespace) -> None:
        jobs.kubectl("delete", f"pod/{pod}", "-n", namespace, "--wait=false")

    def trains_on(after: int) -> None:
        wait_step(jobs, after + 10)

    def new_trainer(old: str) -> None:
        jobs.eventually(
            "there is a new trainer",
            lambda: [p for p in jobs.pods(NAME, "trainer") if p["metadata"]["uid"] != old and ready(p)],
            COMES_BACK_S,
        )

    # Seldom: what is resumed from is what a trainer saves when it is asked to end.
    checkpoint = {"everySteps": 1000, "keep": 2}
    apply_example(jobs, tmp_path, algorithm={"steps": STEPS}, checkpoint=checkpoint)
    jobs.wait_phase(NAME, "Running", deadline_s=STARTS_S)
    wait_step(jobs, 20)

    delete(f"{NAME}-inference-1")
    trains_on(step(jobs))
    delete(name(only(jobs.pods(NAME, "actor"))))
    trains_on(step(jobs))
    delete(f"{NAME}-coordinator-0")
    trains_on(step(jobs))
    for pod in node.kubectl.get("pods", "-n", SYSTEM)["items"]:
        delete(name(pod), SYSTEM)
    trains_on(step(jobs))
    jobs.eventually("both servers are ready", lambda: jobs.status(NAME)["inference"].get("ready") == 2, COMES_BACK_S)

    servers = lives(jobs.pods(NAME, "inference"))
    trainer = only(jobs.pods(NAME, "trainer"))
    reached = [step(jobs)]
    delete(name(trainer))
    new_trainer(trainer["metadata"]["uid"])
    trains_on(step(jobs))
    counted = counted_restarts(jobs)

    trainer = only(jobs.pods(NAME, "trainer"))
    reached.append(step(jobs))
    evict(jobs, name(trainer))
    new_trainer(trainer["metadata"]["uid"])
    assert lives(jobs.pods(NAME, "inference")) == servers, "a server was restarted by a trainer's end"
    trains_on(step(jobs))
    assert counted_restarts(jobs) == counted, "an eviction was counted as a failure"

    jobs.wait_phase(NAME, "Succeeded", deadline_s=600.0)
    found = read_run(node, jobs, runtime)
    check_run(found, STEPS)
    assert set(found["epochs"]) == {1, 2, 3}, "the trainer came back twice"
    for epoch, before in zip((2, 3), reached, strict=True):
        assert found["epochs"].index(epoch) + 1 > before, "steps that a trainer's end had saved were lost"
    rollout = ("rollout", "status", f"deployment/{DEPLOYMENT}", "-n", SYSTEM, "--timeout=5s")
    node.kubectl(*rollout)
