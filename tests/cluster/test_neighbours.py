"""Two runs at once in two namespaces, and a stranger who knocks at their doors."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.images import Image
from cluster.node import Node
from cluster.pods import phase, pod, pod_spec
from cluster.runs import NAME, apply_example, read_run
from control_plane.jobs import Jobs

STEPS = 100
STARTS_S = 300.0
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


def test_two_runs_of_one_name_side_by_side_keep_to_themselves(
    node: Node, jobs: Jobs, neighbours: Jobs, runtime: Image, tmp_path: Path
) -> None:
    both = (jobs, neighbours)
    for number, one in enumerate(both):
        overlay = tmp_path / str(number)
        overlay.mkdir()
        engine: dict[str, Any] = {"engine": "reference", "engineArgs": None, "replicas": 1 + number}
        apply_example(one, overlay, algorithm={"steps": STEPS + number}, inference=engine, evaluation=None)
    for one in both:
        one.wait_phase(NAME, "Running", deadline_s=STARTS_S)
    assert token(jobs) != token(neighbours)
    for one, other in (both, both[::-1]):
        send_stranger(one, runtime, token(other))
    for one in both:
        codes = answers(one)
        assert len(codes) > 40
        assert {asked: code for asked, code in codes.items() if code != REFUSED} == {}
    for one in both:
        one.wait_phase(NAME, "Succeeded", deadline_s=STARTS_S)
    for number, one in enumerate(both):
        found = read_run(node, one, runtime)
        assert found["steps"] == list(range(1, STEPS + number + 1))
        assert found["groups"] == found["distinct_groups"]
        assert set(map(int, found["trained_by_step"])) == set(found["steps"])
