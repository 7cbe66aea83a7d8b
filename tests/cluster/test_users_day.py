"""What a user does with a run besides applying it: a quota in the way, scaling, suspending, shortening, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.images import Image
from cluster.node import Node
from cluster.pods import lives
from cluster.runs import NAME, apply_example, check_whole, read_run, step, wait_step
from control_plane.jobs import Jobs

STEPS = 1000
"""So many that it is not done before it is suspended: two servers start meanwhile."""
STEPS_LEFT = 40
"""When it is resumed."""
STARTS_S = 300.0
VLLM_STARTS_S = 120.0

pytestmark = [pytest.mark.timeout(1200, func_only=True), pytest.mark.usefixtures("operator")]


def quota(pods: int) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"count/statefulsets.apps": str(pods)}},
    }


def test_a_run_waits_for_its_quota_is_scaled_suspended_shortened_and_resumed(
    node: Node, jobs: Jobs, runtime: Image, tmp_path: Path
) -> None:
    def ready(count: int) -> bool:
        return bool(jobs.status(NAME)["inference"].get("ready") == count)

    def others() -> dict[str, tuple[str, int]]:
        return lives([pod for role in ("coordinator", "actor", "trainer") for pod in jobs.pods(NAME, role)])

    node.kubectl.create([quota(1)], "-n", jobs.namespace)
    apply_example(jobs, tmp_path, algorithm={"steps": STEPS}, inference={"replicas": 1})
    told = jobs.wait_reason(NAME, "ResourcesCreated", "QuotaExceeded")
    assert "small" in told["message"]
    node.kubectl("delete", "resourcequota", "small", "-n", jobs.namespace)
    jobs.wait_phase(NAME, "Running", deadline_s=STARTS_S)
    wait_step(jobs, 10)

    before = others() | lives(jobs.pods(NAME, "inference"))
    jobs.kubectl("scale", f"rltj/{NAME}", "--replicas=2", "-n", jobs.namespace)
    jobs.eventually("the new server serves", lambda: ready(2), VLLM_STARTS_S)
    wait_step(jobs, step(jobs) + 10)
    now = others() | lives(jobs.pods(NAME, "inference"))
    assert {name: now[name] for name in before} == before, "another pod was restarted for the new server"
    jobs.kubectl("scale", f"rltj/{NAME}", "--replicas=1", "-n", jobs.namespace)
    jobs.eventually("one server is left", lambda: len(jobs.pods(NAME, "inference")) == 1, 60.0)
    wait_step(jobs, step(jobs) + 10)

    jobs.suspend(NAME)
    jobs.wait_phase(NAME, "Suspended", deadline_s=120.0)
    assert jobs.pods(NAME, "trainer") + jobs.pods(NAME, "inference") + jobs.pods(NAME, "actor") == []
    reached = step(jobs)
    steps = reached + STEPS_LEFT
    jobs.resume(NAME, algorithm={"steps": steps})
    jobs.wait_phase(NAME, "Running", deadline_s=STARTS_S)
    assert step(jobs) >= reached, "steps that a suspend had saved were lost"
    jobs.wait_phase(NAME, "Succeeded", deadline_s=600.0)
    check_whole(read_run(node, jobs, runtime), steps)
