"""What a reconcile cannot get past is told in the status, and the reconcile still counts as failed."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest

from inflight_operator import reconciler
from inflight_operator.apply import Applier
from inflight_operator.events import EventWriter
from inflight_operator.kube import Kube, KubeError
from inflight_operator.progress import ProgressReader
from inflight_operator.reconciler import Reconciler
from inflight_operator.store import Store
from inflight_operator.tokens import Tokens
from inflight_runtime.api import KIND
from support.cluster_jobs import SETTINGS, make_job

KEY = "team/letters"


class Server:
    """Takes status and events; all else fails with one error."""

    def __init__(self, job: dict[str, Any], error: KubeError) -> None:
        self.job = job
        self.error = error
        self.events: list[str] = []
        self.gone = False

    async def patch(
        self, kind: str, namespace: str, name: str, patch: dict[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        if kind != KIND:
            raise self.error
        if self.gone:
            raise KubeError(404, "NotFound", f'rltrainingjobs.inflight.dev "{name}" not found')
        self.job["status"] = {**self.job.get("status", {}), **patch["status"]}
        self.job["metadata"]["resourceVersion"] = str(int(self.job["metadata"]["resourceVersion"]) + 1)
        return copy.deepcopy(self.job)

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["kind"] != "Event":
            raise self.error
        self.events.append(manifest["reason"])
        return manifest

    async def get(self, *_: str) -> None:
        raise self.error

    async def list(self, *_: str, **__: str) -> list[dict[str, Any]]:
        raise self.error


class World:
    """A reconciler with one job."""

    def __init__(self, error: KubeError, **status: Any) -> None:
        job = make_job().model_dump(mode="json", by_alias=True, exclude_none=True)
        job["metadata"] = {"name": "letters", "namespace": "team", "uid": "u", "generation": 1, "resourceVersion": "1"}
        job["status"] = status
        self.server = Server(job, error)
        self.store = Store()
        self.store.put(KIND, copy.deepcopy(job))
        kube = cast(Kube, self.server)
        tokens = Tokens(kube)
        self.reconciler = Reconciler(
            kube,
            self.store,
            SETTINGS,
            applier=Applier(kube, self.store, tokens),
            tokens=tokens,
            progress=ProgressReader(tokens.token, lambda key: None),
            events=EventWriter(kube),
        )

    def reconcile(self) -> float | None:
        return asyncio.run(self.reconciler.reconcile(KEY))

    @property
    def conditions(self) -> dict[str, tuple[str, str, str]]:
        found = self.server.job["status"].get("conditions", [])
        return {one["type"]: (one["status"], one["reason"], one.get("message", "")) for one in found}


FORBIDDEN = KubeError(403, "Forbidden", 'pods is forbidden: User "x" cannot list resource "pods"')


def test_a_fault_of_the_operator_is_told_once_and_raised_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("containers")

    monkeypatch.setattr(reconciler, "build_children", broken)
    world = World(FORBIDDEN)
    for _ in range(3):
        with pytest.raises(KeyError):
            world.reconcile()
    state, reason, message = world.conditions["Ready"]
    assert (state, reason) == ("False", "InternalError")
    assert "KeyError: 'containers'" in message
    assert world.conditions["Reconciling"][:2] == ("True", "InternalError")
    assert world.server.events == ["InternalError"]


def test_a_right_that_a_suspend_lacks_is_told_and_the_rest_of_the_status_kept() -> None:
    world = World(FORBIDDEN, phase="Suspending", starts=1, suspendingSince="2026-01-01T00:00:00Z")
    job = world.server.job
    job["spec"]["suspend"] = True
    job["metadata"]["resourceVersion"] = "2"
    world.store.put(KIND, copy.deepcopy(job))
    for _ in range(2):
        with pytest.raises(KubeError):
            world.reconcile()
    assert world.conditions["Ready"][:2] == ("False", "PermissionDenied")
    assert 'cannot list resource "pods"' in world.conditions["Ready"][2]
    assert job["status"]["phase"] == "Suspending"
    assert world.server.events == ["PermissionDenied"]


def test_a_job_that_was_deleted_meanwhile_is_not_tried_again() -> None:
    world = World(FORBIDDEN)
    world.server.gone = True
    assert world.reconcile() is None


def test_what_passes_is_not_told() -> None:
    world = World(KubeError(503, "ServiceUnavailable", "x"), phase="Suspending", starts=1)
    job = world.server.job
    job["spec"]["suspend"] = True
    job["metadata"]["resourceVersion"] = "2"
    world.store.put(KIND, copy.deepcopy(job))
    with pytest.raises(KubeError):
        world.reconcile()
    assert world.conditions == {}
