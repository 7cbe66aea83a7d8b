"""A cluster without JobSet: a job says so, and runs when JobSet comes. On a control plane of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cluster import Cluster, ensure_binaries, eventually, running_cluster
from control_plane.cluster.jobset import custom_resources
from control_plane.jobs import Jobs, job
from control_plane.operator_process import operator_for
from control_plane.troubles import Told

CRD = "crd/jobsets.jobset.x-k8s.io"


@pytest.fixture
def without_jobset() -> Iterator[Cluster]:
    """A control plane whose JobSet has been taken away."""
    with running_cluster() as own:
        own.kubectl("delete", CRD, "--wait=true")
        yield own


def test_a_job_says_that_jobset_is_missing_and_runs_when_it_comes(without_jobset: Cluster, tmp_path: Path) -> None:
    own = without_jobset
    with own.namespace() as namespace, operator_for(own, namespace, tmp_path / "operator") as operator:
        operator.start()
        try:
            jobs, told = Jobs(own.kubectl, namespace), Told(Jobs(own.kubectl, namespace), "a")
            jobs.create(job("a"))
            status = told.is_waiting("JobSetMissing", "the cluster has no JobSet", "install JobSet 0.11")
            assert status["phase"] == "Pending"
            told.one_warning("JobSetMissing")
            roles = {pod["metadata"]["labels"]["inflight.dev/role"] for pod in jobs.pods("a")}
            assert roles <= {"coordinator"}  # nothing that would hold GPUs
            own.kubectl.create(custom_resources(ensure_binaries().jobset_crds))
            eventually("the JobSet is made", lambda: jobs.child("jobset/a-t"), 60)
            jobs.wait_phase("a", "Running", deadline_s=60)
            # It is watched, too, though it was not there when the watches began.
            own.kubectl("delete", "jobset", "a-t", "-n", namespace)
            eventually("it is made again", lambda: jobs.child("jobset/a-t"))
            assert operator.running()
            assert "Traceback" not in operator.log
        finally:
            sys.stdout.write(operator.log)
