"""What of the API client needs no API server: paths, and what an error means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from inflight_operator.kube import KINDS, Kube, KubeError


@pytest.mark.parametrize(
    ("kind", "namespace", "name", "subresource", "path"),
    [
        ("ConfigMap", "team", "", "", "/api/v1/namespaces/team/configmaps"),
        ("Pod", "", "", "", "/api/v1/pods"),
        ("JobSet", "team", "a-t", "", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/a-t"),
        (
            "RLTrainingJob",
            "team",
            "a",
            "status",
            "/apis/inflight.dev/v1alpha1/namespaces/team/rltrainingjobs/a/status",
        ),
        ("Secret", "te/am", "a b", "", "/api/v1/namespaces/te%2Fam/secrets/a%20b"),
    ],
)
def test_objects_are_where_the_api_keeps_them(
    kind: str, namespace: str, name: str, subresource: str, path: str
) -> None:
    assert KINDS[kind].path(namespace, name, subresource) == path


@pytest.mark.parametrize(
    ("status", "reason", "missing", "exists", "passing"),
    [
        (404, "NotFound", True, False, False),
        (409, "AlreadyExists", False, True, False),
        (409, "Conflict", False, False, True),
        (403, "Forbidden", False, False, False),
        (422, "Invalid", False, False, False),
        (429, "TooManyRequests", False, False, True),
        (500, "InternalError", False, False, True),
        (0, "Unreachable", False, False, True),
    ],
)
def test_an_error_says_whether_trying_again_helps(
    status: int, reason: str, missing: bool, exists: bool, passing: bool
) -> None:
    error = KubeError(status, reason, "words")
    assert (error.missing, error.exists, error.passing) == (missing, exists, passing)
    assert str(error) == f"{reason}: words"


MANIFEST = {"kind": "Service", "metadata": {"namespace": "team", "name": "a"}}


class Server:
    """Answers everything with ``{}``, and notes what came; while ``held`` it keeps those who ask waiting."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.asked, self.free = asyncio.Event(), asyncio.Event()
        self.free.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.came.append(request.method)
        self.asked.set()
        await self.free.wait()
        return web.json_response({})


@contextlib.asynccontextmanager
async def connected(connections: int = 100) -> AsyncIterator[tuple[Server, Kube]]:
    server = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(application) as listening:
        configuration = Configuration(host=str(listening.make_url("")).rstrip("/"))
        configuration.connection_pool_maxsize = connections
        async with Kube(configuration, deadline_s=10.0) as kube:
            yield server, kube


def forbid() -> None:
    raise PermissionError("the lease is lost")


async def test_a_write_that_is_forbidden_is_not_sent_and_reading_goes_on() -> None:
    async with connected() as (server, kube):
        kube.before_write = forbid
        for write in (
            kube.create(MANIFEST),
            kube.apply(MANIFEST, "uid"),
            kube.patch("Service", "team", "a", {}),
            kube.delete("Service", "team", "a"),
        ):
            with pytest.raises((PermissionError, KubeError)):
                await write
        assert server.came == []
        await kube.get("Service", "team", "a")
        await kube.patch("Lease", "team", "a", {})
        assert server.came == ["GET", "PATCH"]


async def test_a_write_that_waited_for_a_connection_while_the_right_was_lost_is_not_sent() -> None:
    async with connected(connections=1) as (server, kube):
        server.free.clear()
        reading = asyncio.create_task(kube.get("Service", "team", "a"))
        await asyncio.wait_for(server.asked.wait(), 10.0)
        writing = asyncio.create_task(kube.create(MANIFEST))
        await asyncio.sleep(0.05)
        assert not writing.done()
        kube.before_write = forbid
        server.free.set()
        await reading
        with pytest.raises((PermissionError, KubeError)):
            await writing
        assert server.came == ["GET"]
