"""Keeps the store in step with the cluster.

Everything is read at the start; then there is what watches tell, and a look from time to time at what they missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Final

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.kube import Kube, KubeError
from inflight_operator.store import WATCHED, Store
from inflight_runtime.api import KIND

logger = logging.getLogger(__name__)

FIRST_CHECK_S: Final = 5.0
"""After watches have begun: what was deleted between the first reading and theirs, none of them tells."""
EVERY_S: Final = 60.0
MISSING_EVERY_S: Final = 5.0
"""Kinds that are not installed are looked for this often."""


class Sync:
    """Fills a store.

    Args:
        kube: the API.
        store: to fill.
        namespace: to look at; empty for all of them.
        changed: told the key of each job that something is new of.
    """

    def __init__(self, kube: Kube, store: Store, namespace: str, changed: Callable[[str], None]) -> None:
        self._kube = kube
        self._store = store
        self._namespace = namespace
        self._changed = changed
        self.missing: set[str] = set()
        """Kinds that the API server does not have."""

    def seen(self, kind: str, event: str, manifest: Manifest) -> None:
        """Take in an event of a watch."""
        keys = self._store.remove(kind, manifest) if event == "DELETED" else self._store.put(kind, manifest)
        for key in keys:
            self._changed(key)

    async def start(self) -> None:
        """Read everything.

        Raises:
            KubeError: something cannot be read.
        """
        for kind in (KIND, *WATCHED):
            await self._read(kind)
        for key in self._store:
            self._changed(key)
        _give_back_memory()

    async def check(self) -> None:
        """Find what watches did not tell: above all what was deleted while they were cut off.

        Raises:
            KubeError: something cannot be read.
        """
        for kind in (KIND, *WATCHED):
            try:
                listed = await self._kube.snapshot(kind, self._namespace, _selector(kind), metadata_only=True)
            except KubeError as error:
                if not error.missing:
                    raise
                self._gone(kind)
                continue
            self.missing.discard(kind)
            lost, newer = self._store.compare(kind, listed.items, listed.version)
            for key in lost:
                logger.info("a watch did not tell of a deleted %s of %s", kind, key)
                self._changed(key)
            for manifest in newer:
                await self._fetch(kind, manifest)

    async def look(self) -> None:
        """:meth:`check`, where failing is no matter."""
        try:
            await self.check()
        except KubeError as error:
            logger.warning("the cluster cannot be looked at: %s", error)

    async def look_for_missing(self) -> None:
        """See whether kinds that were not installed are now."""
        for kind in sorted(self.missing):
            try:
                await self._read(kind)
            except KubeError as error:
                logger.debug("%s: %s", kind, error)

    async def run(self, kinds_changed: Callable[[], None]) -> None:
        """Check from time to time until cancelled.

        Args:
            kinds_changed: told when a kind has come or gone.
        """
        before = set(self.missing)
        clock = asyncio.get_running_loop().time
        due = clock() + FIRST_CHECK_S
        while True:
            await asyncio.sleep(min(max(0.0, due - clock()), MISSING_EVERY_S if self.missing else EVERY_S))
            if self.missing:
                await self.look_for_missing()
            if clock() >= due:
                due = clock() + EVERY_S
                await self.look()
                _give_back_memory()
            if self.missing != before:
                logger.info("kinds that are not installed: %s", ", ".join(sorted(self.missing)) or "none")
                before = set(self.missing)
                kinds_changed()

    async def _read(self, kind: str) -> None:
        try:
            listed = await self._kube.list(kind, self._namespace, _selector(kind))
        except KubeError as error:
            if not error.missing:
                raise
            self._gone(kind)
            return
        self.missing.discard(kind)
        for manifest in listed:
            for key in self._store.put(kind, manifest):
                self._changed(key)

    async def _fetch(self, kind: str, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        found = await self._kube.get(kind, metadata["namespace"], metadata["name"])
        for key in set() if found is None else self._store.put(kind, found):
            logger.info("a watch did not tell of a changed %s of %s", kind, key)
            self._changed(key)

    def _gone(self, kind: str) -> None:
        self.missing.add(kind)
        for key in self._store.drop_all(kind):
            self._changed(key)


def _selector(kind: str) -> str:
    return "" if kind == KIND else names.WATCH_SELECTOR


def _give_back_memory() -> None:
    """Hand freed memory back: reading a whole cluster takes a lot for a moment, and glibc would keep it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library keeps what it likes
        ctypes.CDLL(None).malloc_trim(0)
