"""Writing children where a real API server cannot be made to show it: lost answers, errors, and time."""

from __future__ import annotations

import asyncio
import copy
import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from inflight_operator import names
from inflight_operator.apply import FIRST_RETRY_S, LAST_RETRY_S, Applied, Applier
from inflight_operator.builders import build_children
from inflight_operator.children import Owner
from inflight_operator.kube import Kube, KubeError
from inflight_operator.store import Store
from inflight_operator.tokens import CHECK_EVERY_S, Tokens
from support.cluster_jobs import FACTS, SETTINGS, UID, make_job

KEY = "team-a/letters"
CHILDREN = build_children(make_job(inference={"replicas": 2}), SETTINGS, FACTS)
WORKLOADS = ["StatefulSet letters-coordinator", "JobSet letters-t", "StatefulSet letters-inference"]
Fault = Callable[[str, str, int], KubeError | None]
"""Asked before each call: verb, ``kind name`` and how often this was called before; an error to answer with."""


class Server:
    """As much of an API server as children need, in memory."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.fault: Fault = lambda verb, what, before: None
        self.lost: set[tuple[str, str]] = set()
        """Calls that are done, and whose answer is lost, once."""
        self._versions = itertools.count(1)

    def _begin(self, verb: str, kind: str, name: str) -> None:
        what = f"{kind} {name}"
        before = self.calls.count((verb, what))
        self.calls.append((verb, what))
        if (error := self.fault(verb, what, before)) is not None:
            raise error

    def _end(self, verb: str, kind: str, name: str) -> None:
        if (verb, f"{kind} {name}") in self.lost:
            self.lost.discard((verb, f"{kind} {name}"))
            raise KubeError(0, "Unreachable", "no answer")

    def _store(self, manifest: dict[str, Any]) -> dict[str, Any]:
        manifest["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = manifest
        return copy.deepcopy(manifest)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self._begin("get", kind, name)
        return copy.deepcopy(self.objects.get((kind, name)))

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._begin("create", kind, name)
        if (kind, name) in self.objects:
            raise KubeError(409, "AlreadyExists", f"{name} already exists")
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = f"uid-{next(self._versions)}"
        answer = self._store(made)
        self._end("create", kind, name)
        return answer

    async def apply(self, manifest: dict[str, Any], uid: str) -> dict[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._begin("apply", kind, name)
        found = self.objects.get((kind, name))
        if found is None:
            raise KubeError(409, "Conflict", "uid mismatch: no existing object was found")
        if found["metadata"]["uid"] != uid:
            raise KubeError(422, "Invalid", f'metadata.uid: Invalid value: "{uid}": field is immutable')
        merged = {**found, **copy.deepcopy(manifest)}
        merged["metadata"] = {**found["metadata"], **merged["metadata"]}
        return self._store(merged)

    async def patch(
        self, kind: str, namespace: str, name: str, patch: dict[str, Any], subresource: str = ""
    ) -> dict[str, Any]:
        self._begin("patch", kind, name)
        found = self.objects.get((kind, name))
        if found is None:
            raise KubeError(404, "NotFound", f"{name} not found")
        found["spec"] = {**found.get("spec", {}), **patch.get("spec", {})}
        annotations = patch.get("metadata", {}).get("annotations", {})
        found["metadata"]["annotations"] = {**found["metadata"].get("annotations", {}), **annotations}
        return self._store(found)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        self._begin("delete", kind, name)
        self.objects.pop((kind, name), None)


class World:
    """An applier with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server()
        self.store = Store()
        kube = cast(Kube, self.server)
        self.tokens = Tokens(kube, clock=lambda: self.now)
        self.applier = Applier(kube, self.store, self.tokens, clock=lambda: self.now)

    def run(self, start: int = 1) -> Applied:
        async def no_pods() -> int:
            return 0

        owner = Owner("letters", UID, start)
        return asyncio.run(self.applier.run(KEY, CHILDREN, owner, no_pods))

    def made(self, verb: str = "create") -> list[str]:
        return [what for called, what in self.server.calls if called == verb]


def refuse(wanted: str, error: KubeError, times: int = 10**9) -> Fault:
    return lambda verb, what, before: error if f"{verb} {what}" == wanted and before < times else None


QUOTA = KubeError(403, "Forbidden", "exceeded quota: q")


def test_all_children_are_made_once_and_then_left_alone() -> None:
    world = World()
    assert world.run() == Applied()
    assert Counter(world.made()) == Counter(f"{child.kind} {child.name}" for child in CHILDREN)
    calls = len(world.server.calls)
    assert world.run() == Applied()
    assert len(world.server.calls) == calls


@pytest.mark.parametrize("refused", [*WORKLOADS, "Secret letters-token", "Service letters-inference"])
def test_a_refused_child_is_tried_again_less_and_less_often_and_nothing_after_it_is_made(refused: str) -> None:
    world = World()
    world.server.fault = refuse(f"create {refused}", QUOTA)
    waits = []
    while world.now < 400:
        applied = world.run()
        assert applied.refusal is not None and applied.refusal.cause.reason == "QuotaExceeded"
        assert applied.again_s is not None
        for _ in range(3):  # events that come in meanwhile cost nothing
            world.run()
        waits.append(applied.again_s)
        world.now += applied.again_s
    assert waits[:7] == [FIRST_RETRY_S * 2**power for power in range(6)] + [LAST_RETRY_S]
    assert world.made().count(refused) == len(waits)
    later = WORKLOADS[WORKLOADS.index(refused) + 1 :] if refused in WORKLOADS else WORKLOADS
    assert set(later).isdisjoint(world.made())
    assert "Deployment letters-actor" not in world.made()
    world.server.fault = lambda verb, what, before: None
    assert world.run() == Applied()


def test_after_a_success_the_next_trouble_is_tried_soon_again() -> None:
    world = World()
    world.server.fault = refuse(f"create {WORKLOADS[0]}", QUOTA, times=3)
    for _ in range(4):
        world.now += world.run().again_s or 0.0
    assert world.run() == Applied()
    coordinator = world.server.objects.pop(("StatefulSet", "letters-coordinator"))
    world.store.remove("StatefulSet", coordinator)
    world.server.fault = refuse(f"create {WORKLOADS[0]}", QUOTA)
    assert world.run().again_s == FIRST_RETRY_S


@pytest.mark.parametrize("child", CHILDREN, ids=lambda child: f"{child.kind}-{child.name}")
def test_a_lost_answer_to_a_create_neither_makes_two_nor_none(child: Any) -> None:
    world = World()
    what = f"{child.kind} {child.name}"
    world.server.lost = {("create", what)}
    applied = world.run()
    assert applied.refusal is not None and applied.refusal.passing
    assert applied.again_s == FIRST_RETRY_S
    world.now += FIRST_RETRY_S
    assert world.run() == Applied()
    assert len(world.server.objects) == len(CHILDREN)
    if child.kind == "Secret":
        # The token that was made is the one that is used.
        stored = world.server.objects["Secret", "letters-token"]["data"]
        again = World()
        again.server = world.server
        assert asyncio.run(again_token(again)) == asyncio.run(world.tokens.token("team-a", "letters"))
        assert world.server.objects["Secret", "letters-token"]["data"] == stored


async def again_token(world: World) -> str:
    return await Tokens(cast(Kube, world.server)).token("team-a", "letters")


@pytest.mark.parametrize(
    "error",
    [
        KubeError(500, "InternalError", "etcdserver: request timed out"),
        KubeError(429, "TooManyRequests", "slow down"),
        KubeError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas: the object has been modified"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_errors_at_any_call_end_with_all_children_there(error: KubeError, seed: int) -> None:
    world = World()

    def fault(verb: str, what: str, before: int) -> KubeError | None:
        return error if (zlib.crc32(f"{verb} {what}".encode()) + before + seed) % 3 == 0 else None

    world.server.fault = fault
    for _ in range(60):
        applied = world.run()
        if applied == Applied():
            break
        assert applied.refusal is not None and applied.refusal.passing
        world.now += applied.again_s or 0.0
    assert applied == Applied()
    assert len(world.server.objects) == len(CHILDREN)


def test_a_child_that_was_replaced_unseen_is_looked_at_again_and_written() -> None:
    world = World()
    world.run()
    # Deleted and made anew by hand, and the watch has not told yet.
    service = world.server.objects["Service", "letters-inference"]
    service["metadata"] |= {"uid": "another", "resourceVersion": "9999"}
    assert world.run(start=2) == Applied()
    assert (
        world.server.objects["Service", "letters-inference"]["metadata"]["annotations"][names.START_ANNOTATION] == "2"
    )
    # Deleted, and the watch has not told yet.
    del world.server.objects["Service", "letters-inference"]
    assert world.run(start=3) == Applied()
    assert ("Service", "letters-inference") in world.server.objects


def test_a_foreign_object_is_asked_for_with_a_growing_pause_and_stays_out_of_the_store() -> None:
    world = World()
    foreign = {"kind": "Service", "metadata": {"name": "letters-inference", "namespace": "team-a", "uid": "theirs"}}
    foreign["metadata"]["labels"] = {names.JOB_LABEL: "letters"}  # type: ignore[index]
    world.server._store(foreign)
    before = copy.deepcopy(foreign)
    waits = []
    for _ in range(4):
        applied = world.run()
        assert applied.refusal is not None and applied.refusal.cause.reason == "NameTaken"
        waits.append(applied.again_s or 0.0)
        world.now += waits[-1]
    assert waits == [1, 2, 4, 8]
    assert world.server.objects["Service", "letters-inference"] == before
    assert world.store.child(KEY, ("Service", "letters-inference")) is None
    del world.server.objects["Service", "letters-inference"]
    assert world.run() == Applied()


def test_what_the_server_always_writes_its_own_way_is_applied_once() -> None:
    world = World()
    world.run()
    service = copy.deepcopy(world.server.objects["Service", "letters-inference"])
    service["spec"]["publishNotReadyAddresses"] = "odd"
    service["spec"]["ports"] = []
    service["metadata"]["resourceVersion"] = "9999"
    world.store.put("Service", service)

    async def same(manifest: dict[str, Any], uid: str) -> dict[str, Any]:
        world.server.calls.append(("apply", f"{manifest['kind']} {manifest['metadata']['name']}"))
        return copy.deepcopy(service)

    world.server.apply = same  # type: ignore[method-assign]
    for _ in range(5):
        assert world.run() == Applied()
    assert world.made("apply") == ["Service letters-inference"]


def test_a_secret_is_looked_at_from_time_to_time_and_made_again_with_the_same_token() -> None:
    world = World()
    world.run()
    data = world.server.objects.pop(("Secret", "letters-token"))["data"]
    world.run()
    assert ("Secret", "letters-token") not in world.server.objects
    world.now += CHECK_EVERY_S
    world.run()
    assert world.server.objects["Secret", "letters-token"]["data"] == data


def test_stopping_and_deleting_what_has_gone_is_no_error() -> None:
    world = World()
    world.run()
    for kind, name in (("StatefulSet", "letters-inference"), ("Deployment", "letters-actor")):
        live = world.store.child(KEY, (kind, name))
        assert live is not None
        del world.server.objects[kind, name]
        asyncio.run(world.applier.stop(KEY, live))
        assert world.store.child(KEY, (kind, name)) is None
        asyncio.run(world.applier.delete(KEY, live))
