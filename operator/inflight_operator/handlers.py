"""Kopf: watches jobs and their children, filtered on the server, and hands on what it sees. Nothing else is Kopf's.

There are only ``on.event`` handlers: no finalizer, no annotation, no retry and no timer of Kopf's. It runs in a thread
with an event loop of its own, since it takes every other task of its loop for its own when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

import kopf

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.kube import KINDS
from inflight_operator.settings import Settings
from inflight_operator.store import WATCHED
from inflight_runtime.api import KIND

logger = logging.getLogger(__name__)

SERVER_TIMEOUT_S: Final = 300
CLIENT_TIMEOUT_S: Final = 310
INACTIVITY_S: Final = 70.0
"""A watch without even a bookmark for this long is dead (the API server sends one every minute)."""
REQUEST_TIMEOUT_S: Final = 20
RECONNECT_S: Final = 1.0
ERROR_BACKOFFS_S: Final = (1, 2, 3, 5, 8, 13, 13, 13)
LISTED_AT_ONCE: Final = 25
"""Objects of a kind, all kinds side by side: parsed they take ten times their bytes. Kopf's default is all of them."""
IDLE_S: Final = 0.05
"""For so long Kopf keeps each object that it has shown us, with a task of its own, in case more comes."""
STOP_S: Final = 10.0

Seen = Callable[[str, str, Manifest], None]
"""Told of each event, in the caller's event loop: kind, type (empty for the first listing) and the object."""


class Watch:
    """Watches from :meth:`start` to :meth:`stop`.

    Args:
        settings: the operator's.
        kinds: to watch; the API server must have them.
        seen: told of each event, in the event loop that calls :meth:`start`.
    """

    def __init__(self, settings: Settings, kinds: Collection[str], seen: Seen) -> None:
        self._settings = settings
        self._kinds = kinds
        self._seen = seen
        self._stop = threading.Event()
        self._asked = False
        self._events: deque[tuple[str, str, Manifest]] = deque()
        self._ended: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        thread = threading.Thread(target=self._run, args=(loop, self._ended), name="kopf", daemon=True)
        thread.start()

    async def ended(self) -> None:
        """Wait until it has ended, which it does only when stopped.

        Raises:
            RuntimeError: it ended of itself; the cause is attached.
        """
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End it, within a few seconds."""
        self._asked = True
        self._stop.set()
        if self._ended is not None:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([self._ended])

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate(loop))
        except BaseException as raised:  # whatever ends the thread must be told
            error = raised
        told = None if error is None and self._asked else RuntimeError(f"watching ended: {error}")
        if told is not None:
            told.__cause__ = error
        try:
            loop.call_soon_threadsafe(_finish, ended, told)
        except RuntimeError:
            return  # the loop has been closed: nobody waits any more

    async def _operate(self, loop: asyncio.AbstractEventLoop) -> None:
        namespace = self._settings.namespace
        try:
            await kopf.operator(
                registry=self._registry(loop),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not namespace,
                namespaces=[namespace] if namespace else [],
                stop_flag=self._stop,
            )
        finally:
            # Kopf has a thread wait for it, which its loop would wait for at its end.
            self._stop.set()

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        for kind in self._kinds:
            group, _, version = KINDS[kind].api_version.rpartition("/")

            # Asynchronous, although it waits for nothing: others each get a thread.
            async def pass_on(event: Any, kind: str = kind, **_: Any) -> None:
                self._events.append((kind, event["type"] or "", dict(event["object"])))
                if len(self._events) == 1:  # else the other loop has been woken up already
                    loop.call_soon_threadsafe(self._take_in)

            kopf.on.event(group, version, KINDS[kind].plural, registry=registry, id=f"see-{kind}")(pass_on)
        return registry

    def _take_in(self) -> None:
        # Left in the queue while it is handed on: no wake-up is due as long as there is one.
        while self._events:
            try:
                self._seen(*self._events[0])
            except Exception:  # the next check of everything makes up for it
                logger.exception("an event could not be taken in")
            self._events.popleft()


class _NoDifferences(kopf.DiffBaseStorage):
    """Spares Kopf from copying each object in search of changes that no handler asks for."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("nothing of Kopf's is ever stored")


def kopf_settings() -> kopf.OperatorSettings:
    """Settings under which Kopf watches what we ask for and writes nothing."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoDifferences()
    settings.peering.standalone = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = ERROR_BACKOFFS_S
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = CLIENT_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.reconnect_backoff = RECONNECT_S
    settings.watching.chunk_size = LISTED_AT_ONCE
    settings.queueing.idle_timeout = IDLE_S
    settings.process.ultimate_exiting_timeout = None  # else it kills the whole process some time after a failure
    for kind in WATCHED:
        group, _, version = KINDS[kind].api_version.rpartition("/")
        settings.watching.label_selectors[group, version, KINDS[kind].plural] = names.WATCH_SELECTOR
    return settings


def watched_kinds(missing: Collection[str]) -> list[str]:
    """Kinds to watch where some are not installed."""
    return [kind for kind in (KIND, *WATCHED) if kind not in missing]


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _finish(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
