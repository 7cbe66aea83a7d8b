"""The main job: applied, it runs; its trainer done, it has succeeded and holds nothing any more."""

from __future__ import annotations

import base64

import pytest

from control_plane.cluster import Cluster, end_pods
from control_plane.jobs import Jobs, condition, job
from control_plane.operator_process import ROOT, Coordinators, OperatorProcess, state

pytestmark = pytest.mark.usefixtures("only_expected_refusals")


def test_the_example_runs_and_succeeds(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators
) -> None:
    key = f"{jobs.namespace}/sort-letters"
    coordinators.states[key] = state(step=17, reward=0.25)
    cluster.kubectl("apply", "-n", jobs.namespace, "-f", str(ROOT / "examples" / "sort-letters" / "job.yaml"))

    jobs.wait_phase("sort-letters", "Running")
    status = jobs.eventually("progress is told", lambda: (s := jobs.status("sort-letters")).get("progress") and s)
    assert (status["progress"]["step"], status["progress"]["rewardMean"]) == (17, 0.25)
    assert (status["inference"]["ready"], status["actors"]["ready"], status["trainer"]["ready"]) == (2, 1, 1)
    assert {kind: one["status"] for kind in CONDITIONS if (one := condition(status, kind))} == CONDITIONS

    coordinators.states[key] = state(step=260, reward=0.9, outcome="succeeded")
    end_pods(cluster.kubectl, jobs.namespace, "inflight.dev/job=sort-letters,inflight.dev/role=trainer")

    status = jobs.wait_phase("sort-letters", "Succeeded")
    assert (status["progress"]["step"], status["progress"]["rewardMean"]) == (260, 0.9)
    assert [pod["status"]["phase"] for pod in jobs.pods("sort-letters")] == ["Succeeded"]
    for gone in ("statefulset/sort-letters-inference", "statefulset/sort-letters-coordinator"):
        assert jobs.child(gone) is None
    assert jobs.child("deployment/sort-letters-actor") is None
    assert jobs.child("pvc/sort-letters-checkpoint") is not None
    ready, complete = condition(status, "Ready"), condition(status, "Complete")
    assert ready is not None and complete is not None
    assert (ready["status"], complete["status"]) == ("True", "True")
    assert condition(status, "Reconciling") is None


CONDITIONS = {
    "Validated": "True",
    "ResourcesCreated": "True",
    "CoordinatorReachable": "True",
    "InferenceReady": "True",
    "ActorsReady": "True",
    "TrainerRunning": "True",
    "Suspended": "False",
    "Ready": "True",
}


def test_the_token_is_in_its_secret_and_nowhere_else(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators
) -> None:
    coordinators.states[f"{jobs.namespace}/small"] = state(step=1)
    jobs.create(job("small"))
    jobs.wait_phase("small", "Running")
    jobs.eventually("progress is read with it", lambda: jobs.status("small").get("progress"))
    secret = jobs.child("secret/small-token")
    assert secret is not None
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert len(token) >= 32
    assert coordinators.tokens == {token}
    everything = cluster.kubectl(
        "get", "configmaps,statefulsets,deployments,jobsets,jobs,pods,events,rltj", "-n", jobs.namespace, "-o", "yaml"
    )
    for kind in (token, secret["data"]["token"]):
        assert kind not in everything
        assert kind not in operator.log
