"""One control plane for the whole session, a namespace for each test, and clients of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import client

from control_plane.cluster import Cluster, running_cluster
from control_plane.cluster.client import connect
from control_plane.expected_refusals import refusals
from control_plane.jobs import Jobs
from control_plane.operator_process import Coordinators, OperatorProcess, operator_for
from support.order import longest_first

HERE = Path(__file__).parent
TEST_DEADLINE_S = 120
LONGEST_FIRST = (
    "test_cut_link.py",
    "test_at_rest.py",
    "test_errors.py",
    "test_lifecycle.py",
    # Two of the four workers have one test so far, and get the next two files at once.
    "test_deletions.py",
    "test_two_operators.py",
    "test_generated.py",
    "test_crashes.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test has its own time limit, without its fixtures: the first may have to build, with deadlines of its own."""
    longest_first(items, LONGEST_FIRST)
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_DEADLINE_S, func_only=True))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The control plane; nothing of it is left after the session."""
    with running_cluster(leave_namespaces=True) as running:
        yield running


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> Iterator[client.ApiClient]:
    """A client that may do everything."""
    with connect(cluster.kubeconfig) as connected:
        yield connected


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def kubeconfig_for(cluster: Cluster, namespace: str) -> Iterator[Callable[[Path], Path]]:
    """Makes a kubeconfig that may do exactly what the ClusterRole in a file says."""
    with contextlib.ExitStack() as accounts:
        yield lambda role_file: accounts.enter_context(cluster.service_account(role_file, namespace))


@pytest.fixture
def jobs(cluster: Cluster, namespace: str) -> Jobs:
    """The test's namespace, as a user handles it."""
    return Jobs(cluster.kubectl, namespace)


@pytest.fixture
def coordinators() -> Iterator[Coordinators]:
    """Answers in place of the jobs' coordinators."""
    with Coordinators() as answering:
        yield answering


@pytest.fixture
def operator(cluster: Cluster, namespace: str, coordinators: Coordinators, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator for the test's namespace, running; its log is shown when the test fails."""
    with operator_for(cluster, namespace, tmp_path / "operator", coordinator_url=coordinators.url) as process:
        process.start()
        yield process
        sys.stdout.write(process.log)


@pytest.fixture
def only_expected_refusals(cluster: Cluster) -> Iterator[None]:
    """Fails a test in which an operator was refused something without a reason that is written down."""
    since = cluster.audit.position()
    yield
    assert not refusals(cluster.audit.events(since))
