"""Whatever a user writes is refused by the API server, or runs, or is told why it does not; nothing harms others."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections import Counter
from typing import Any

import pytest
from kubernetes import client

from control_plane.cluster import Cluster
from control_plane.generated_jobs import generated_jobs
from control_plane.jobs import Jobs, condition, job
from control_plane.operator_process import OperatorProcess
from control_plane.troubles import calls, quota
from inflight_operator.crd import GROUP, PLURAL, VERSION
from inflight_operator.reasons import REASONS

COUNT = 240
BATCH = 60
THREADS = 6
TOLD_S = 80.0
WINDOW_S = 5.0
SUCCESSES = 'inflight_reconciles_total{result="success"}'


def create_all(admin: client.ApiClient, namespace: str, jobs: list[dict[str, Any]]) -> Counter[int]:
    """POST all of them as a careless client would, without strict validation; how often each status was answered."""
    api = client.CustomObjectsApi(admin)

    def create(made: dict[str, Any]) -> int:
        try:
            api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, made)
        except client.ApiException as error:
            assert json.loads(error.body)["message"], error
            return int(error.status)
        return 201

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return Counter(pool.map(create, jobs))


def unexplained(found: list[dict[str, Any]], *, starting_will_do: bool) -> list[str]:
    """Jobs that neither run (or start, where that will do) nor say why they do not."""
    unfinished = {"Suspending"} if starting_will_do else {"Suspending", "Starting"}
    left = []
    for one in found:
        status = one.get("status", {})
        ready = condition(status, "Ready")
        if ready is None or ready["reason"] not in REASONS or ready["reason"] in unfinished:
            left.append(f"{one['metadata']['name']}: {status.get('phase')} {ready}")
        elif ready["status"] == "False" and not ready["message"]:
            left.append(f"{one['metadata']['name']}: no message: {ready}")
        elif status.get("observedGeneration") != one["metadata"]["generation"]:
            left.append(f"{one['metadata']['name']}: an old spec")
    return left


@pytest.mark.timeout(420, func_only=True)
def test_generated_jobs_are_refused_or_run_or_told_why_not(
    cluster: Cluster, admin: client.ApiClient, jobs: Jobs, operator: OperatorProcess
) -> None:
    operator.wait_watching()
    answers: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    made = generated_jobs(COUNT)
    # The cluster is small, and some jobs ask for a thousand pods.
    with quota(cluster, jobs.namespace, {"pods": "100"}):
        for begin in range(0, COUNT, BATCH):
            before = operator.metrics()
            answers += create_all(admin, jobs.namespace, made[begin : begin + BATCH])
            # Fake pods come up one by one: the last batch stands for all.
            found = told(jobs, starting_will_do=begin + BATCH < COUNT)
            reasons.update((condition(one["status"], "Ready") or {})["reason"] for one in found)
            reconciles = operator.metrics()[SUCCESSES] - before[SUCCESSES]
            assert reconciles < 60 * len(found)
            if begin + BATCH >= COUNT:
                since = cluster.audit.position()
                time.sleep(WINDOW_S)
                # What is told needs no more work: a try at what was refused now and then, a look at pods.
                assert calls(cluster, since, operator.user, jobs.namespace).total() < 3 * WINDOW_S * len(found)
            jobs.kubectl("delete", "rltj", "--all", "-n", jobs.namespace, "--wait=true", deadline_s=60)
            jobs.kubectl("delete", "pvc", "--all", "-n", jobs.namespace, "--wait=false")
        assert set(answers) <= {201, 400, 422}
        assert min(answers[201], answers[422]) > COUNT / 10, answers
        assert len(reasons) >= 4, reasons
        jobs.eventually("all pods are gone", lambda: not jobs.kubectl.get("pods", "-n", jobs.namespace)["items"], 60)
        jobs.create(job("good"))
        jobs.wait_phase("good", "Running", deadline_s=30)
    assert operator.running()
    assert "Traceback" not in operator.log
    assert operator.metrics()["inflight_queue_depth"] == 0


def every(jobs: Jobs) -> list[dict[str, Any]]:
    """All jobs of the namespace."""
    found: list[dict[str, Any]] = jobs.kubectl.get("rltj", "-n", jobs.namespace)["items"]
    return found


def told(jobs: Jobs, *, starting_will_do: bool) -> list[dict[str, Any]]:
    """Wait until every job says how it is."""
    end = time.monotonic() + TOLD_S
    while left := unexplained(found := every(jobs), starting_will_do=starting_will_do):
        assert time.monotonic() < end, "\n".join(left)
        time.sleep(0.5)
    return found
