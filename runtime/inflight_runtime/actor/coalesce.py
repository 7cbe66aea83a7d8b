"""Merges the requests that one group's attempts make for the same prompt into one request for n answers.

Eight attempts that ask the same thing in the same turn of the event loop cost one HTTP exchange and one prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight_runtime.actor.router import Route, Sampled
from inflight_runtime.protocol import GenerateRequest


class Generator(Protocol):
    """Answers generate requests (the router)."""

    async def generate(self, request: GenerateRequest, route: Route) -> list[Sampled]:
        """Get ``request.n`` answers."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What two requests must have in common, beside the prompt, to be merged."""

    max_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Waiter:
    attempt: int
    seed: int
    future: asyncio.Future[Sampled]


class Coalescer:
    """The requests of one group, on their way to the router."""

    def __init__(self, generator: Generator, route: Route, name: str) -> None:
        """Make one for a group.

        Args:
            generator: the router.
            route: what binds the group's requests together.
            name: prefix of the request ids, for the servers' logs.
        """
        self._generator = generator
        self._route = route
        self._name = name
        self._requests = 0
        self._waiting: dict[tuple[Parameters, tuple[int, ...]], list[_Waiter]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(self, prompt_ids: Sequence[int], parameters: Parameters, attempt: int, seed: int) -> Sampled:
        """Get one answer; merged with what other attempts ask in this turn of the event loop.

        Answers of one request are in the order of the attempts, so a run does not depend on task scheduling.

        Raises:
            GenerationError: see :meth:`Router.generate`.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(attempt, seed, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.setdefault((parameters, tuple(prompt_ids)), []).append(waiter)
        return await waiter.future

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (parameters, prompt_ids), waiters in waiting.items():
            waiters.sort(key=lambda waiter: waiter.attempt)
            self._requests += 1
            request = GenerateRequest(
                prompt_ids=list(prompt_ids),
                n=len(waiters),
                max_tokens=parameters.max_tokens,
                temperature=parameters.temperature,
                stop=list(parameters.stop),
                seeds=[waiter.seed for waiter in waiters],
                request_id=f"{self._name}-{self._requests}",
            )
            task = asyncio.create_task(self._send(request, waiters))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, request: GenerateRequest, waiters: Sequence[_Waiter]) -> None:
        task = asyncio.current_task()
        open_count = len(waiters)

        def one_less(future: asyncio.Future[Sampled]) -> None:
            nonlocal open_count
            open_count -= 1
            if future.cancelled() and open_count == 0 and task is not None:
                task.cancel()  # nobody waits for these answers any more

        for waiter in waiters:
            waiter.future.add_done_callback(one_less)
        try:
            answers = await self._generator.generate(request, self._route)
        except asyncio.CancelledError:
            for waiter in waiters:
                waiter.future.cancel()
            raise
        except Exception as error:
            for waiter in waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
            return
        for waiter, sampled in zip(waiters, answers, strict=True):
            if not waiter.future.done():
                waiter.future.set_result(sampled)
