import pytest

from inflight_runtime.weights.transports.pair import serve_store
from support.weight_peers import fork_server


@pytest.fixture(scope="session")
def processes():
    with fork_server() as context:
        yield context


@pytest.fixture(scope="session")
def port():
    store, port = serve_store("127.0.0.1")
    yield port
    del store
