"""Objects of one kind, kept up to date by a list and watches of it, over cut links and restarts of the API server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final, TypeVar

from inflight_runtime.cluster.connection import (
    ClusterError,
    Connection,
    Object,
    RefusedError,
    Resource,
    UnreachableError,
)

WATCH_S: Final = 60
"""Length of one watch request: how long an answer that got lost on the way can stay unnoticed."""
GIVE_UP_S: Final = 300.0
"""Without any answer for so long."""
LONGEST_PAUSE_S: Final = 15.0
PASSING: Final = (408, 429, 500, 502, 503, 504)
GONE: Final = 410
T = TypeVar("T")


async def moments(
    connection: Connection, resource: Resource, query: Mapping[str, str], tell: Callable[[str], None]
) -> AsyncGenerator[dict[str, Object], None]:
    """Get all objects that match, by namespace and name, now and after every change.

    Args:
        connection: where to ask.
        resource: the kind.
        query: selectors.
        tell: is told when the API server does not answer, and when it does again.

    Raises:
        ClusterError: the API server refuses, or has not answered for :data:`GIVE_UP_S`.
    """
    found: dict[str, Object] = {}
    version = ""
    good, failures = time.monotonic(), 0
    while True:
        try:
            if not version:
                objects, version = await connection.list(resource, query)
                found = {_key(one): one for one in objects}
                if failures:
                    tell("the API server answers again")
                good, failures = time.monotonic(), 0
                yield dict(found)
            async with aclosing(connection.watch(resource, {**query, "resourceVersion": version}, WATCH_S)) as events:
                async for event in events:
                    if event.get("type") == "ERROR":
                        raise _refused(event["object"])
                    version = event["object"]["metadata"]["resourceVersion"]
                    if _take_in(found, event):
                        yield dict(found)
            good = time.monotonic()
            continue
        except RefusedError as error:
            if error.status != GONE and error.status not in PASSING:
                raise
            trouble: ClusterError = error
        except UnreachableError as error:
            trouble = error
        version = ""
        if time.monotonic() - good > GIVE_UP_S:
            raise trouble
        failures += 1
        if failures == 1 and not (isinstance(trouble, RefusedError) and trouble.status == GONE):
            tell(f"{trouble}; trying again")
        await asyncio.sleep(min(2.0 ** (failures - 1), LONGEST_PAUSE_S))


async def ticking(source: AsyncGenerator[T, None], every_s: float) -> AsyncGenerator[T, None]:
    """Get what ``source`` gives, and its newest again whenever nothing new has come for ``every_s``."""
    pending: asyncio.Task[T] | None = None
    newest: list[T] = []
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(source))
            await asyncio.wait([pending], timeout=every_s)
            if pending.done():
                done, pending = pending, None
                try:
                    newest = [done.result()]
                except StopAsyncIteration:
                    return
            if newest:
                yield newest[0]
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ClusterError):
                await pending
        await source.aclose()


def _key(one: Object) -> str:
    return f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}"


def _take_in(found: dict[str, Object], event: Object) -> bool:
    one = event["object"]
    if event["type"] == "DELETED":
        return found.pop(_key(one), None) is not None
    if event["type"] in ("ADDED", "MODIFIED"):
        found[_key(one)] = one
        return True
    return False


def _refused(status: Object) -> RefusedError:
    words = str(status.get("message") or status)
    return RefusedError(int(status.get("code") or 500), words, f"the API server ended the watch: {words}")
