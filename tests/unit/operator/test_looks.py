"""When pods and events are looked at, and what is made of them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from inflight_operator.kube import Kube, KubeError
from inflight_operator.looks import FIRST_LOOK_S, LAST_PAUSE_S, Look, Looks
from inflight_runtime.api.status import RoleStatus

KEY = "team/a"
PULL = {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}


class Cluster:
    """Answers lists and reads from memory, and counts them."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {"Pod": [], "Event": []}
        self.claims: dict[str, dict[str, Any]] = {}
        self.error: KubeError | None = None
        self.asked: list[str] = []

    async def list(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> list[dict[str, Any]]:
        self.asked.append(kind)
        if self.error is not None:
            raise self.error
        assert namespace == "team"
        wanted = fields.rpartition("=")[2]
        return [one for one in self.lists[kind] if kind == "Pod" or one["involvedObject"]["uid"] == wanted]

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked.append(kind)
        return self.claims.get(name)


class World:
    """Looks with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cluster = Cluster()
        self.looks = Looks(cast(Kube, self.cluster), lambda: self.now)
        self.children: list[dict[str, Any]] = []

    def at(self, seconds: float, **ready: int) -> Look:
        """What is known some seconds after the beginning, with so many of two servers and one actor ready."""
        self.now = 1000.0 + seconds
        desired = {"inference": 2, "actor": 1}
        counts = {role: RoleStatus(desired=desired[role], ready=count) for role, count in ready.items()}
        return asyncio.run(self.looks.causes(KEY, "a", self.children, [], counts))


def pod(role: str, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    metadata = {"name": f"{role}-0", "labels": {"inflight.dev/role": role}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, **status}}


def stateful_set(role: str) -> dict[str, Any]:
    metadata = {"name": f"a-{role}", "uid": f"{role}-uid", "labels": {"inflight.dev/role": role}}
    return {"kind": "StatefulSet", "metadata": metadata}


def event(uid: str, message: str, reason: str = "FailedCreate") -> dict[str, Any]:
    seen = "2026-01-01T00:00:01Z"
    return {
        "involvedObject": {"uid": uid},
        "reason": reason,
        "type": "Warning",
        "message": message,
        "lastTimestamp": seen,
    }


def test_nothing_is_looked_at_while_all_roles_are_ready() -> None:
    world = World()
    assert world.at(0, inference=2, actor=1) == Look()
    assert world.at(100, inference=2, actor=1) == Look()
    assert world.cluster.asked == []


def test_pods_that_start_get_a_moment_before_somebody_looks() -> None:
    world = World()
    world.cluster.lists["Pod"] = [pod("inference", containerStatuses=[{"image": "x:1", "state": PULL}])] * 2
    first = world.at(0, inference=0)
    assert first.causes == {} and first.again_s == FIRST_LOOK_S
    assert world.cluster.asked == []
    assert world.at(FIRST_LOOK_S, inference=0).causes["inference"].reason == "ImagePullFailed"


def test_looks_come_less_and_less_often_while_nothing_changes_and_soon_when_something_does() -> None:
    world = World()
    world.cluster.lists["Pod"] = [pod("inference", "Running")] * 2
    looked: list[int] = []
    for second in range(600):
        before = len(world.cluster.asked)
        world.at(second, inference=0)
        if len(world.cluster.asked) > before:
            looked.append(second)
    assert looked[:6] == [3, 7, 15, 31, 63, 123]
    assert {later - earlier for earlier, later in itertools.pairwise(looked[5:])} == {int(LAST_PAUSE_S)}
    world.at(600, inference=1)
    assert world.at(603, inference=1).again_s == 4
    assert len(world.cluster.asked) == len(looked) + 1


def test_what_was_seen_stays_until_the_role_is_ready_or_the_next_look() -> None:
    world = World()
    world.cluster.lists["Pod"] = [pod("inference", containerStatuses=[{"image": "x:1", "state": PULL}])] * 2
    world.at(0, inference=0, actor=0)
    seen = world.at(3, inference=0, actor=0).causes
    assert world.at(4, inference=0, actor=1).causes == seen  # another role's news
    assert world.at(5, inference=2, actor=0).causes == {}
    world.cluster.lists["Pod"] = [pod("inference", "Running")] * 2
    world.at(10, inference=0)
    assert world.at(13, inference=0).causes == {}


def test_missing_pods_are_explained_by_the_events_of_what_should_make_them() -> None:
    world = World()
    world.children = [stateful_set("inference"), stateful_set("coordinator")]
    world.cluster.lists["Event"] = [event("inference-uid", "exceeded quota: q"), event("coordinator-uid", "denied")]
    world.cluster.lists["Pod"] = [pod("inference", "Running"), pod("inference", "Failed")]
    world.at(0, inference=1)
    assert world.at(3, inference=1).causes["inference"].reason == "QuotaExceeded"


def test_a_deployment_needs_no_events() -> None:
    world = World()
    failing = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}]
    world.children = [
        {
            "kind": "Deployment",
            "metadata": {"name": "a-actor", "uid": "u", "labels": {"inflight.dev/role": "actor"}},
            "status": {"conditions": failing},
        }
    ]
    world.at(0, actor=0)
    assert world.at(3, actor=0).causes["actor"].reason == "QuotaExceeded"
    assert world.cluster.asked == ["Pod"]


def test_pods_that_wait_for_a_claim_are_explained_by_the_claim() -> None:
    world = World()
    words = "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims"
    unbound = pod("actor", conditions=[{"type": "PodScheduled", "status": "False", "message": words}])
    unbound["spec"] = {"volumes": [{"name": "x"}, {"name": "c", "persistentVolumeClaim": {"claimName": "data"}}]}
    world.cluster.lists["Pod"] = [unbound]
    world.cluster.claims["data"] = {"metadata": {"name": "data", "uid": "claim-uid"}, "status": {"phase": "Pending"}}
    world.at(0, actor=0)
    assert world.at(3, actor=0).causes["actor"].reason == "Unschedulable"  # nothing is known of the claim
    world.cluster.lists["Event"] = [event("claim-uid", 'storageclass "x" not found', "ProvisioningFailed")]
    cause = world.at(7, actor=0).causes["actor"]
    assert (cause.reason, cause.message) == ("ClaimPending", 'claim data has no volume: storageclass "x" not found')


def test_a_right_that_is_missing_is_told_and_a_hiccup_is_not() -> None:
    world = World()
    world.cluster.error = KubeError(503, "ServiceUnavailable", "etcdserver: leader changed")
    world.at(0, actor=0)
    assert world.at(3, actor=0).causes == {}
    world.cluster.error = KubeError(403, "Forbidden", 'pods is forbidden: User "x" cannot list resource "pods"')
    assert world.at(7, actor=0).causes["actor"].reason == "PermissionDenied"
    world.cluster.error = None
    assert world.at(15, actor=0).causes == {}


def test_pauses_grow_while_the_reason_stays_and_begin_anew_after_it_was_over() -> None:
    world = World()
    pauses = []
    for _ in range(9):
        pauses.append(world.looks.pause(KEY, "ConfigMapNotFound"))
        world.now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert world.looks.pause(KEY, "Forbidden") == 1
    world.now += 10
    assert world.looks.pause(KEY, "Forbidden") == 1
    assert world.looks.pause(KEY, "Forbidden") == 2
    world.looks.forget(KEY)
    assert world.looks.pause(KEY, "Forbidden") == 1
