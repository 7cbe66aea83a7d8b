"""Keeping the store in step: the first reading, what watches tell, what they miss, and kinds that come and go."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator import names
from inflight_operator.kube import Kube, KubeError, Snapshot
from inflight_operator.store import Store
from inflight_operator.sync import EVERY_S, FIRST_CHECK_S, MISSING_EVERY_S, Sync
from inflight_runtime.api import KIND
from support.virtual_time import run_in_virtual_time


class Cluster(Kube):
    """An API server of a few lines, with versions."""

    def __init__(self) -> None:
        self.version = 0
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.absent: set[str] = set()
        self.down = False
        self.listed: list[str] = []
        self.fetched: list[str] = []
        self.between = lambda: None
        """Called between the moment a reading is of and its arrival."""

    def write(self, kind: str, name: str, job: str = "a") -> dict[str, Any]:
        self.version += 1
        metadata: dict[str, Any] = {"namespace": "team", "name": name, "resourceVersion": str(self.version)}
        if kind != KIND:
            metadata["labels"] = {names.JOB_LABEL: job}
        self.objects[kind, name] = {"kind": kind, "metadata": metadata}
        return copy.deepcopy(self.objects[kind, name])

    def erase(self, kind: str, name: str) -> dict[str, Any]:
        self.version += 1
        gone = self.objects.pop((kind, name))
        gone["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(gone)

    async def snapshot(
        self, kind: str, namespace: str, selector: str = "", fields: str = "", *, metadata_only: bool = False
    ) -> Snapshot:
        self.listed.append(kind)
        if self.down:
            raise KubeError(0, "Unreachable", "no answer")
        if kind in self.absent:
            raise KubeError(404, "NotFound", "no such kind")
        found = [copy.deepcopy(one) for (of, _), one in self.objects.items() if of == kind]
        answer = Snapshot(found, str(self.version))
        self.between()
        return answer

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.fetched.append(f"{kind}/{name}")
        found = copy.deepcopy(self.objects.get((kind, name)))
        self.between()
        return found


class World:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.store = Store()
        self.changed: list[str] = []
        self.sync = Sync(self.cluster, self.store, "", self.changed.append)

    def names(self) -> set[str]:
        """What the store knows, with versions."""
        jobs = [job for key in self.store if (job := self.store.job(key))]
        children = [one for key in ("team/a", "team/b") for one in self.store.children(key).values()]
        return {_named(one) for one in (*jobs, *children)}

    def truth(self) -> set[str]:
        return {_named(one) for one in self.cluster.objects.values()}


def _named(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}@{manifest['metadata']['resourceVersion']}"


@pytest.fixture
def world() -> World:
    return World()


async def test_everything_is_read_at_the_start(world: World) -> None:
    world.cluster.write(KIND, "a")
    world.cluster.write("Service", "a-s")
    await world.sync.start()
    assert world.names() == world.truth()
    assert set(world.changed) == {"team/a"}


async def test_what_cannot_be_read_at_the_start_is_told(world: World) -> None:
    world.cluster.down = True
    with pytest.raises(KubeError):
        await world.sync.start()


async def test_watches_are_believed_once(world: World) -> None:
    service = world.cluster.write("Service", "a-s")
    world.sync.seen("Service", "ADDED", service)
    world.sync.seen("Service", "MODIFIED", service)
    assert world.changed == ["team/a"]
    world.sync.seen("Service", "DELETED", world.cluster.erase("Service", "a-s"))
    assert world.changed == ["team/a", "team/a"]
    assert world.names() == set()


async def test_a_check_finds_what_watches_did_not_tell(world: World) -> None:
    for name in ("gone", "old", "same"):
        world.sync.seen("Service", "ADDED", world.cluster.write("Service", name))
    world.cluster.erase("Service", "gone")
    world.cluster.write("Service", "old")
    world.cluster.write("Deployment", "new", job="b")
    world.changed.clear()
    await world.sync.check()
    assert world.names() == world.truth()
    assert sorted(world.changed) == ["team/a", "team/a", "team/b"]
    assert sorted(world.cluster.fetched) == ["Deployment/new", "Service/old"], "and nothing that is known already"


async def test_a_check_of_what_is_known_reads_no_object(world: World) -> None:
    world.cluster.write("PersistentVolumeClaim", "left-by-a-job-that-is-gone")
    world.cluster.write(KIND, "b")
    await world.sync.start()
    world.changed.clear()
    for _ in range(3):
        await world.sync.check()
    assert (world.cluster.fetched, world.changed) == ([], [])


async def test_a_deletion_told_during_a_reading_counts(world: World) -> None:
    world.cluster.write("Service", "a-s")

    def delete() -> None:
        world.cluster.between = lambda: None
        world.sync.seen("Service", "DELETED", world.cluster.erase("Service", "a-s"))

    # Of the first list, before the one of Services: seen before it was ever known.
    await world.sync.start()
    world.cluster.write("Service", "a-s")
    world.cluster.between = lambda: delete() if world.cluster.fetched else None
    await world.sync.check()
    assert world.names() == world.truth() == set()


async def test_kinds_that_are_missing_lose_their_objects_and_come_again(world: World) -> None:
    world.cluster.write(KIND, "a")
    await world.sync.start()
    world.cluster.absent.add(KIND)
    world.cluster.objects.clear()
    world.changed.clear()
    await world.sync.check()
    assert world.sync.missing == {KIND}
    assert (world.changed, world.names()) == (["team/a"], set())

    await world.sync.look_for_missing()
    assert world.sync.missing == {KIND}
    world.cluster.absent.clear()
    world.cluster.write(KIND, "a")
    await world.sync.look_for_missing()
    assert world.sync.missing == set()
    assert world.names() == world.truth()


def test_checks_go_on_when_one_fails() -> None:
    async def main() -> None:
        world = World()
        world.cluster.down = True
        checks = asyncio.create_task(world.sync.run(lambda: None))
        await asyncio.sleep(FIRST_CHECK_S + 1)
        assert len(world.cluster.listed) == 1
        world.cluster.down = False
        world.cluster.write("Service", "a-s")
        await asyncio.sleep(EVERY_S)
        assert world.names() == world.truth()
        checks.cancel()

    run_in_virtual_time(main())


def test_watches_are_to_be_made_anew_when_a_kind_has_come() -> None:
    async def main() -> None:
        world = World()
        world.cluster.absent.add("JobSet")
        await world.sync.start()
        told: list[float] = []
        clock = asyncio.get_running_loop().time
        checks = asyncio.create_task(world.sync.run(lambda: told.append(clock())))
        await asyncio.sleep(EVERY_S)
        assert told == []
        world.cluster.absent.clear()
        began = clock()
        await asyncio.sleep(EVERY_S)
        assert len(told) == 1
        assert told[0] - began <= MISSING_EVERY_S
        checks.cancel()

    run_in_virtual_time(main())


@given(st.lists(st.tuples(st.sampled_from(["write", "erase"]), st.sampled_from("xyz"), st.booleans()), max_size=20))
def test_a_check_makes_up_for_any_lost_events(history: list[tuple[str, str, bool]]) -> None:
    world = World()
    for what, name, heard in history:
        if what == "write":
            event, manifest = "MODIFIED", world.cluster.write("Service", name)
        elif ("Service", name) in world.cluster.objects:
            event, manifest = "DELETED", world.cluster.erase("Service", name)
        else:
            continue
        if heard:
            world.sync.seen("Service", event, manifest)
    asyncio.run(world.sync.check())
    assert world.names() == world.truth()
