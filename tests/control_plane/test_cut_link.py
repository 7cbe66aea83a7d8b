"""A link to the API server that is cut without a word."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import yaml

from control_plane.cluster import Cluster
from control_plane.jobs import Jobs, job
from control_plane.links import Link
from control_plane.operator_process import Coordinators, operator_for

CUT_S = 120.0
"""Longer than any deadline of the operator's: 20 s for a call, 60 s for a reconcile, 70 s for a silent watch."""
CATCH_UP_S = 90.0


pytestmark = pytest.mark.usefixtures("only_expected_refusals")


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
