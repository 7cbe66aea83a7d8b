"""An operator with nothing to do writes nothing."""

from __future__ import annotations

import time

import pytest

from control_plane.cluster import Cluster, eventually
from control_plane.jobs import Jobs, job
from control_plane.operator_process import Coordinators, OperatorProcess, writes

REST_S = 60.0


pytestmark = pytest.mark.usefixtures("only_expected_refusals")


@pytest.mark.timeout(300, func_only=True)
def test_at_rest_nothing_is_written(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators
) -> None:
    names = [f"j{number}" for number in range(8)]
    jobs.create(*map(job, names), job("asleep", suspend=True))
    for name in names:
        jobs.wait_phase(name, "Running", deadline_s=60)
        jobs.wait_reason(name, "CoordinatorReachable", "Unreachable")
    jobs.wait_phase("asleep", "Suspended")
    assert not at_rest(cluster, operator)
    since = cluster.audit.position()
    operator.kill()
    operator.start()
    operator.wait_watching()
    assert not at_rest(cluster, operator)
    assert not writes(cluster.audit.events(since), operator), "a restart is no news either"


def at_rest(cluster: Cluster, operator: OperatorProcess) -> list[str]:
    """What is written in a minute, beginning once nothing has been written for three seconds."""

    def quiet() -> bool:
        since = cluster.audit.position()
        time.sleep(3)
        return not writes(cluster.audit.events(since), operator)

    eventually("the operator comes to rest", quiet, 30)
    since = cluster.audit.position()
    time.sleep(REST_S)
    return [f"{event.verb} {event.resource} {event.name}" for event in writes(cluster.audit.events(since), operator)]
