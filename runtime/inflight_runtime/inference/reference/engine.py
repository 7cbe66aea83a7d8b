"""The engine thread: admit -> prefill -> one token for each active sequence in turn, and weights in between.

Commands (pause, commit, abort) run on the same thread between two tokens, so that a commit is atomic by construction:
no token is ever computed from half of one version and half of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from inflight_runtime.inference.reference.decoder import Cache, Decoder
from inflight_runtime.inference.reference.sampling import make_generator, sample_token
from inflight_runtime.inference.service import Load
from inflight_runtime.types import Version

logger = logging.getLogger(__name__)

T = TypeVar("T")
Finish = Literal["stop", "length", "abort"]
TokenListener = Callable[[int, int], None]
"""Called on the event loop with (answer, token id) for each sampled token."""


class EngineError(RuntimeError):
    """The engine ended the request; the message says why."""


@dataclass(slots=True)
class Answer:
    """One sequence being generated, and its result."""

    seed: int
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version | None] = field(default_factory=list)
    """The version that sampled each token; ``None`` before the first commit."""
    finish: Finish | None = None
    cache: Cache | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One prompt and the answers asked for.

    Attributes:
        prompt_ids: at least one token, fewer than the model's length.
        max_tokens: bound of each answer, clipped so that prompt and answer fit the model.
        temperature: 0 takes the likeliest token.
        stop_ids: tokens that end an answer (and are part of it).
        stopped: whether a stop string has appeared, asked after each token when the request has any.
    """

    prompt_ids: list[int]
    answers: list[Answer]
    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    stopped: Callable[[list[int]], bool] | None = None
    listener: TokenListener | None = None
    done: Future[None] = field(default_factory=Future)
    waiting: int = 0
    """Index of the first answer that is not admitted yet."""
    prefill: tuple[Version | None, Tensor, Cache] | None = None
    """The prompt's last logits and cache, shared among answers that start under the same version."""


class Engine:
    """Generates for many requests on one thread.

    Args:
        decoder: computes logits; its model is changed only through :meth:`call`.
        max_concurrent: sequences generated at once; the others wait.
        kv_cache: after a commit ``keep`` goes on with keys and values of the older weights, ``recompute`` computes
            those of every running sequence anew.
        slow_token_s: fault switch, seconds slept at each token.
        max_waiting: requests that may wait; one more is refused.
        on_failure: told why, from the engine thread, when the engine has died.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_concurrent: int,
        kv_cache: Literal["keep", "recompute"] = "keep",
        seed: int = 0,
        slow_token_s: float = 0.0,
        max_waiting: int = 4096,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._max_concurrent = max_concurrent
        self._kv_cache = kv_cache
        self._slow_token_s = slow_token_s
        self._max_waiting = max_waiting
        self._on_failure = on_failure
        self._seeds = itertools.count(seed << 32)
        self._version: Version | None = None
        self._paused = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._active: deque[tuple[Job, int]] = deque()
        self._dead = ""
        self._gate = threading.Lock()
        """Held while a command is posted, so that none is posted to a thread that has ended."""
        self.tokens = 0
        """Tokens sampled since the start."""
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # --- from the event loop ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; running requests end with :class:`EngineError`."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def load(self) -> Load:
        """Sequences running and waiting, as of now."""
        waiting = sum(len(job.answers) - job.waiting for job in tuple(self._waiting))
        return Load(running=len(self._active), waiting=waiting)

    def make_answers(self, count: int, seeds: list[int] | None) -> list[Answer]:
        """``count`` empty answers; without seeds each gets the next one of this server's own stream."""
        chosen = seeds if seeds is not None else [next(self._seeds) for _ in range(count)]
        return [Answer(seed, make_generator(seed)) for seed in chosen]

    async def generate(self, job: Job) -> None:
        """Fill ``job.answers``; a cancelled call takes the job out of the engine.

        Raises:
            EngineError: the job was ended by :meth:`abort_all`, by :meth:`stop` or by a failure of the model.
        """
        self._post(lambda: self._enqueue(job))
        try:
            await asyncio.wrap_future(job.done)
        finally:
            if not job.done.done() or job.done.cancelled():
                with contextlib.suppress(EngineError):
                    self._post(lambda: self._remove(job))

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine thread between two tokens and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(future)

    async def pause(self) -> None:
        """Stop between two tokens; running sequences keep their place."""
        await self.call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on."""
        await self.call(lambda: self._set_paused(False))

    async def set_version(self, version: Version) -> None:
        """Label every token sampled from now on; the caches of older weights are dropped under ``recompute``."""
        await self.call(lambda: self._set_version(version))

    async def abort_all(self, reason: str) -> None:
        """End every job with :class:`EngineError`."""
        await self.call(lambda: self._fail_all(reason))

    # --- on the engine thread -----------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._gate:
            if self._dead:
                raise EngineError(self._dead)
            self._commands.put(command)

    def _main(self) -> None:
        torch.set_num_threads(1)
        reason = "the server is shutting down"
        try:
            while self._run_commands():
                self._admit()
                self._advance()
        except BaseException as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
            logger.exception("the engine failed")
            if self._on_failure is not None:
                self._on_failure(reason)
        with self._gate:
            self._dead = reason
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command()
        self._fail_all(reason)

    def _run_commands(self) -> bool:
        """Run what has been posted; wait for more while there is nothing to do. False at the end."""
        while True:
            idle = self._paused or not (self._active or self._waiting)
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_concurrent:
            job = self._waiting[0]
            index = job.waiting
            job.waiting += 1
            if job.waiting == len(job.answers):
                self._waiting.popleft()
            self._active.append((job, index))
            if not self._first_token(job, index):
                self._active.pop()
                _settle(job)

    def _first_token(self, job: Job, index: int) -> bool:
        if job.prefill is None or job.prefill[0] != self._version:
            logits, cache = self._decoder.step(job.prompt_ids, None)
            job.prefill = (self._version, logits, cache)
        _, logits, job.answers[index].cache = job.prefill
        if job.waiting == len(job.answers):
            job.prefill = None
        return self._sample(job, index, logits)

    def _advance(self) -> None:
        """One token for the sequence whose turn it is."""
        if not self._active:
            return
        job, index = self._active[0]
        answer = job.answers[index]
        if answer.cache is None:
            logits, answer.cache = self._decoder.step(job.prompt_ids + answer.ids, None)
        else:
            logits, answer.cache = self._decoder.step(answer.ids[-1:], answer.cache)
        if self._sample(job, index, logits):
            self._active.rotate(-1)
        else:
            self._active.popleft()
            _settle(job)

    def _sample(self, job: Job, index: int, logits: Tensor) -> bool:
        """Append one token; whether the answer goes on."""
        answer = job.answers[index]
        token, logprob = sample_token(logits, job.temperature, answer.generator)
        answer.ids.append(token)
        answer.logprobs.append(logprob)
        answer.versions.append(self._version)
        self.tokens += 1
        if self._slow_token_s:
            time.sleep(self._slow_token_s)
        if token in job.stop_ids or (job.stopped is not None and job.stopped(answer.ids)):
            answer.finish = "stop"
        elif len(answer.ids) >= job.max_tokens:
            answer.finish = "length"
        if job.listener is not None:
            job.listener(index, token)
        if answer.finish is None:
            return True
        answer.cache = None
        return False

    def _enqueue(self, job: Job) -> None:
        if len(self._waiting) >= self._max_waiting:
            _fail(job, f"{self._max_waiting} requests are waiting already; retry elsewhere or later")
        elif not job.done.cancelled():
            self._waiting.append(job)

    def _remove(self, job: Job) -> None:
        self._waiting = deque(other for other in self._waiting if other is not job)
        self._active = deque(entry for entry in self._active if entry[0] is not job)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _set_version(self, version: Version) -> None:
        self._version = version
        if self._kv_cache == "recompute":
            for job, index in self._active:
                job.answers[index].cache = None

    def _fail_all(self, reason: str) -> None:
        jobs = {job for job, _ in self._active} | set(self._waiting)
        self._active.clear()
        self._waiting.clear()
        for job in jobs:
            _fail(job, reason)


def _settle(job: Job) -> None:
    """Tell the job's owner when the last of its answers has ended."""
    if all(answer.finish is not None for answer in job.answers) and job.done.set_running_or_notify_cancel():
        job.done.set_result(None)


def _fail(job: Job, reason: str) -> None:
    if job.done.set_running_or_notify_cancel():
        job.done.set_exception(EngineError(reason))
