"""What of the API client needs no API server: paths, and what an error means."""

from __future__ import annotations

import pytest
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


async def test_a_write_that_is_forbidden_is_not_sent_and_reading_goes_on() -> None:
    sent: list[str] = []

    async def call_api(method: str, *_: object) -> object:
        sent.append(method)
        raise OSError

    async with Kube(Configuration(host="https://127.0.0.1:1")) as kube:
        kube._api.call_api = call_api

        def forbid() -> None:
            raise PermissionError("the lease is lost")

        kube.before_write = forbid
        manifest = {"kind": "Service", "metadata": {"namespace": "team", "name": "a"}}
        for write in (
            kube.create(manifest),
            kube.apply(manifest, "uid"),
            kube.patch("Service", "team", "a", {}),
            kube.delete("Service", "team", "a"),
        ):
            with pytest.raises((PermissionError, KubeError)):
                await write
        assert sent == []
        for allowed in (kube.get("Service", "team", "a"), kube.patch("Lease", "team", "a", {})):
            with pytest.raises(KubeError):
                await allowed
        assert sent == ["GET", "PATCH"]
