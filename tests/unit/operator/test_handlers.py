"""Kopf's part: what is watched, that it writes nothing of its own, and that its end is told."""

from __future__ import annotations

import asyncio
import threading

import kopf
import pytest

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.handlers import Watch, kopf_settings, watched_kinds
from inflight_operator.kube import KINDS
from inflight_operator.settings import Settings
from inflight_operator.store import WATCHED
from inflight_runtime.api import KIND


def test_children_are_filtered_on_the_server_and_jobs_are_not() -> None:
    selectors = kopf_settings().watching.label_selectors
    for kind in WATCHED:
        group, _, version = KINDS[kind].api_version.rpartition("/")
        assert selectors[group, version, KINDS[kind].plural] == names.WATCH_SELECTOR
    assert len(selectors) == len(WATCHED)


def test_kopf_neither_posts_nor_looks_for_peers_nor_scans() -> None:
    settings = kopf_settings()
    assert not settings.posting.enabled
    assert settings.peering.standalone
    assert settings.scanning.disabled


def test_no_call_of_kopfs_lasts_longer_than_a_dead_link_may() -> None:
    settings = kopf_settings()
    assert settings.networking.request_timeout <= 20
    assert settings.watching.inactivity_timeout <= 70
    assert settings.watching.client_timeout > settings.watching.server_timeout


def test_secrets_pods_and_leases_are_not_watched() -> None:
    assert not {"Secret", "Pod", "Lease", "Event"} & set(WATCHED)
    assert watched_kinds(()) == [KIND, *WATCHED]
    assert watched_kinds({"JobSet", KIND}) == [kind for kind in WATCHED if kind != "JobSet"]


def test_handlers_are_of_events_only() -> None:
    async def registry() -> kopf.OperatorRegistry:
        watch = Watch(Settings(), watched_kinds(()), lambda *_: None)
        return watch._registry(asyncio.get_running_loop())

    made = asyncio.run(registry())
    assert len(made._watching.get_all_handlers()) == 1 + len(WATCHED)
    for others in (made._changing, made._spawning, made._indexing, made._webhooks):
        assert others.get_all_handlers() == []


async def test_an_end_that_nobody_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(**_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(kopf, "operator", fail)
    watch = Watch(Settings(), [KIND], lambda *_: None)
    watch.start()
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="watching ended: broken"):
            await watch.ended()
        await watch.stop()


async def test_it_ends_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_stopped(*, stop_flag: object, **_: object) -> None:
        await asyncio.to_thread(stop_flag.wait)  # type: ignore[attr-defined]

    monkeypatch.setattr(kopf, "operator", until_stopped)
    watch = Watch(Settings(), [KIND], lambda *_: None)
    watch.start()
    async with asyncio.timeout(10):
        await watch.stop()
        await watch.ended()


async def test_a_failure_of_kopfs_ends_its_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_as_kopf_does(*, stop_flag: threading.Event, **_: object) -> None:
        # A thread of the loop's own waits for the flag, and the loop waits for that thread.
        waiting = asyncio.get_running_loop().run_in_executor(None, stop_flag.wait)
        await asyncio.wait([waiting], timeout=0.05)
        raise ValueError("a watch has failed: 404")

    monkeypatch.setattr(kopf, "operator", fail_as_kopf_does)
    watch = Watch(Settings(), [KIND], lambda *_: None)
    watch.start()
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="404"):
            await watch.ended()


async def test_every_event_is_handed_on_in_order_even_after_one_that_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    last = asyncio.Event()

    def take(kind: str, event: str, manifest: Manifest) -> None:
        if manifest["number"] == 3:
            raise ValueError("broken")
        seen.append(manifest["number"])
        if manifest["number"] == 199:
            last.set()

    async def tell(*, registry: kopf.OperatorRegistry, stop_flag: threading.Event, **_: object) -> None:
        (handler,) = registry._watching.get_all_handlers()
        for number in range(200):
            await handler.fn(event={"type": "ADDED", "object": {"number": number}})  # type: ignore[call-arg,misc]
            if number % 20 == 0:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(stop_flag.wait)

    monkeypatch.setattr(kopf, "operator", tell)
    watch = Watch(Settings(), [KIND], take)
    watch.start()
    async with asyncio.timeout(10):
        await last.wait()
    await watch.stop()
    assert seen == [number for number in range(200) if number != 3]
