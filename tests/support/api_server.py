"""An API server that answers what a test has written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from inflight_runtime.cluster.connection import RefusedError, Resource

Answer = Callable[[], Any]


def refused(status: int, words: str = "no") -> RefusedError:
    return RefusedError(status, words, words)


def thing(name: str, version: int, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": str(version)}
    } | more


def event(kind: str, one: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": one}


class FakeConnection:
    """Each list takes the next of ``lists``, each watch the next of ``watches``; then the watch stays silent."""

    context, namespace, place = "kind", "team", "namespace team"

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.logs: dict[str, list[Any]] = {}
        self.asked: list[dict[str, str]] = []
        self.objects: dict[str, Any] = {}

    async def get(self, resource: Resource, name: str) -> Any:
        found = self.objects.get(name)
        if found is None:
            raise refused(404, f'{resource.full_name} "{name}" not found')
        return found

    async def list(self, resource: Resource, query: dict[str, str]) -> tuple[list[Any], str]:
        answer = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, "1"

    async def watch(self, resource: Resource, query: dict[str, str], seconds: int) -> AsyncGenerator[Any, None]:
        self.asked.append(query)
        for one in self.watches.pop(0) if self.watches else [None]:
            if isinstance(one, Exception):
                raise one
            if one is None:
                await asyncio.sleep(3600)
            else:
                yield one

    async def log(self, pod: str, query: dict[str, str], silence_s: float) -> AsyncGenerator[bytes, None]:
        self.asked.append(query)
        for line in self.logs[pod].pop(0):
            if isinstance(line, Exception):
                raise line
            if line is None:
                await asyncio.sleep(3600)
            else:
                yield line
