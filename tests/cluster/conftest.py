"""One node for the whole session, and a namespace for each test in which only restricted pods are admitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from cluster.images import Image, build_image
from cluster.installed import installed_operator
from cluster.node import Node, running_node
from cluster.traces import traces_at_rest
from control_plane.cluster.client import connect
from control_plane.jobs import Jobs

HERE = Path(__file__).parent
TEST_DEADLINE_S = 180
BEFORE_THE_NODE = "test_node_end.py"
"""Has a node of its own, and a machine has only one at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test has its own time limit, without its fixtures: the first may have to build, with deadlines of its own.

    What plays a job's pods itself runs before the operator is installed, which would make them, too.
    """
    items.sort(key=lambda item: (item.path.name != BEFORE_THE_NODE, "operator" in getattr(item, "fixturenames", ())))
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_DEADLINE_S, func_only=True))


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """The node; nothing of it is left after the session."""
    before = traces_at_rest()
    with running_node() as running:
        yield running
    assert traces_at_rest() == before


@pytest.fixture
def namespace(node: Node) -> Iterator[str]:
    """A fresh namespace under Pod Security ``restricted``."""
    with node.namespace() as name:
        node.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        yield name


@pytest.fixture(scope="session")
def image(node: Node) -> Image:
    """An image with Python in it, on the node: the operator's own."""
    built = build_image("operator", present=node.images.blobs())
    node.import_image(built.archive)
    return built


@pytest.fixture(scope="session")
def runtime(node: Node) -> Image:
    """The image of every role, on the node."""
    built = build_image("runtime", present=node.images.blobs())
    node.import_image(built.archive)
    return built


@pytest.fixture(scope="session")
def operator(node: Node, image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The operator, installed by the chart."""
    with installed_operator(node, tmp_path_factory.mktemp("helm")):
        yield


@pytest.fixture(scope="session")
def admin(node: Node) -> Iterator[client.ApiClient]:
    """A client that may do everything."""
    with connect(node.kubeconfig) as connected:
        yield connected


@pytest.fixture
def jobs(node: Node, namespace: str) -> Jobs:
    """The test's namespace, as a user handles it."""
    return Jobs(node.kubectl, namespace)
