"""Two runs at once in two namespaces, one with a trainer of two pods, and a stranger who knocks at their doors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.images import Image
from cluster.node import Node
from cluster.pods import lives, phase, pod, pod_spec
from cluster.runs import NAME, apply_example, read_run, wait_step
from control_plane.jobs import Jobs

STEPS = 80
STARTS_S = 300.0
COMES_BACK_S = 240.0
EVERY_STEPS = 20
TWO_PODS: dict[str, Any] = {
    "trainer": {"engine": "fsdp2", "nodes": 2, "resources": {"requests": {"cpu": "100m"}}},
    "checkpoint": {"everySteps": EVERY_STEPS, "storage": {"accessModes": ["ReadWriteMany"]}},
}
"""A trainer of one rank in each of two pods; both runs' requests must fit the node together."""
KNOCK = (Path(__file__).parent / "in_pod" / "knock.py").read_text()
REFUSED = 401

pytestmark = [pytest.mark.timeout(900, func_only=True), pytest.mark.usefixtures("operator")]


@pytest.fixture
def neighbours(node: Node) -> Iterator[Jobs]:
    with node.namespace() as name:
        node.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        yield Jobs(node.kubectl, name)


def token(jobs: Jobs) -> str:
    return base64.b64decode(jobs.there(f"secret/{NAME}-token")["data"]["token"]).decode()


def send_stranger(jobs: Jobs, image: Image, foreign: str) -> None:
    """Start a pod of the job's own namespace, without its labels, that knocks."""
    arguments = [f"{NAME}-coordinator", f"{NAME}-inference-0.{NAME}-inference-pods", foreign]
    spec = pod_spec(image.name, ["python", "-c", KNOCK, *arguments])
    jobs.kubectl.create([pod("stranger", spec)], "-n", jobs.namespace)


def answers(jobs: Jobs) -> dict[str, int]:
    """The codes that it was answered with."""
    phase(jobs.kubectl, jobs.namespace, "stranger", "Succeeded")
    codes: dict[str, int] = json.loads(jobs.kubectl("logs", "stranger", "-n", jobs.namespace))
    return codes


def trainers(jobs: Jobs, phase: str) -> dict[str, dict[str, Any]]:
    """The trainer's pods that are in a phase, by their index."""
    pods = [one for one in jobs.pods(NAME, "trainer") if one["status"]["phase"] == phase]
    return {one["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: one for one in pods}


def lose_a_rank(jobs: Jobs) -> None:
    """Kill rank 1 in its pod, and wait until both ranks are back in new pods."""
    before = trainers(jobs, "Running")
    assert set(before) == {"0", "1"}
    servers = lives(jobs.pods(NAME, "inference"))
    name = before["1"]["metadata"]["name"]
    jobs.kubectl("exec", name, "-n", jobs.namespace, "--", "python", "-c", "import os; os.kill(-1, 9)")
    old = {one["metadata"]["uid"] for one in before.values()}

    def back() -> bool:
        now = trainers(jobs, "Running")
        return set(now) == {"0", "1"} and not old & {one["metadata"]["uid"] for one in now.values()}

    jobs.eventually("both trainers are back", back, COMES_BACK_S)
    assert lives(jobs.pods(NAME, "inference")) == servers, "a server was restarted by a trainer's end"


def test_two_runs_of_one_name_side_by_side_keep_to_themselves(
    node: Node, jobs: Jobs, neighbours: Jobs, runtime: Image, tmp_path: Path
) -> None:
    both = (jobs, neighbours)
    for number, one in enumerate(both):
        overlay = tmp_path / str(number)
        overlay.mkdir()
        engine: dict[str, Any] = {"engine": "reference", "engineArgs": None, "replicas": 1 + number}
        spec = TWO_PODS if number else {}
        apply_example(one, overlay, algorithm={"steps": STEPS + number}, inference=engine, evaluation=None, **spec)
    for one in both:
        one.wait_phase(NAME, "Running", deadline_s=STARTS_S)
    assert token(jobs) != token(neighbours)
    for one, other in (both, both[::-1]):
        send_stranger(one, runtime, token(other))
    wait_step(neighbours, EVERY_STEPS + 1)
    lose_a_rank(neighbours)
    for one in both:
        codes = answers(one)
        assert len(codes) > 40
        assert {asked: code for asked, code in codes.items() if code != REFUSED} == {}
    for one in both:
        one.wait_phase(NAME, "Succeeded", deadline_s=STARTS_S)
    assert set(trainers(neighbours, "Succeeded")) == {"0", "1"}
    assert [one.status(NAME)["restarts"] for one in both] == [0, 1]
    for number, one in enumerate(both):
        found = read_run(node, one, runtime)
        assert found["steps"] == list(range(1, STEPS + number + 1))
        assert found["groups"] == found["distinct_groups"]
        assert set(map(int, found["trained_by_step"])) == set(found["steps"])
        assert set(found["epochs"]) == set(range(1, 2 + number)), "the trainer of two pods came back once"
        assert found["epochs"].count(1) >= EVERY_STEPS, "the run was begun anew, not from its checkpoint"
        assert found["checkpoint"] == f"step-{STEPS + number:08}"
