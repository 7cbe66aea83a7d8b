"""Plays one group: all attempts at one problem, side by side, each on its own account."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from inflight_runtime.actor.blocking import BlockingBatcher, BlockingPool
from inflight_runtime.actor.coalesce import Coalescer, Generator
from inflight_runtime.actor.environments import Environment, Messages, Problem, PromptTooLongError, Reward, RewardError
from inflight_runtime.actor.loading import describe_error
from inflight_runtime.actor.metrics import ActorMetrics
from inflight_runtime.actor.router import GenerationError, GenerationRefusedError, Route
from inflight_runtime.actor.shim import GroupContext, RolloutClient, SamplingRefusedError
from inflight_runtime.actor.tokenizer import TextCodec, TokenizerError
from inflight_runtime.actor.tokens import Recorder, build_segments, shorten
from inflight_runtime.config.roles import ActorConfig
from inflight_runtime.protocol import Lease
from inflight_runtime.types import Attempt, FinishReason, Group, Version

log = logging.getLogger(__name__)

CANCEL_GRACE_S: Final = 2.0
NOT_RETRIED: Final = (PromptTooLongError, SamplingRefusedError, GenerationRefusedError, TokenizerError, RewardError)
"""Failures that a further try would only repeat."""


class NoAnswerError(Exception):
    """A rollout gave a reward without having sampled anything: there is nothing to train on."""


@dataclass(slots=True, eq=False)
class _Played:
    """What one attempt came to."""

    recorder: Recorder | None = None
    reward: Reward | None = None
    error: BaseException | None = None


class GroupPlayer:
    """Plays groups of one environment against one router."""

    def __init__(
        self,
        *,
        config: ActorConfig,
        environment: Environment,
        codec: TextCodec,
        generator: Generator,
        pool: BlockingPool,
        metrics: ActorMetrics,
    ) -> None:
        self._config = config
        self._environment = environment
        self._codec = codec
        self._generator = generator
        self._pool = pool
        self._metrics = metrics

    async def play(self, lease: Lease) -> Group:
        """Play a group to its end; attempts that failed for good are in it as such.

        Raises:
            PromptTooLongError: the problem's prompt leaves no room for an answer.
        """
        blocking = BlockingBatcher(self._pool)
        route = Route(Version(lease.min_version.epoch, lease.min_version.step))
        coalescer = Coalescer(self._generator, route, f"{self._config.actor_id}-{lease.group_id}")
        context = GroupContext(
            group_id=lease.group_id,
            codec=self._codec,
            coalescer=coalescer,
            blocking=blocking,
            sampling=self._config.sampling,
            max_length=self._config.model.max_length,
            model_name=self._config.served_name,
            reward_timeout_s=self._config.environment.reward_timeout_s,
            evaluating=lease.kind == "eval",
        )
        try:
            played = [_Played() for _ in range(lease.attempts)]
            try:
                problem, context.opening = await blocking.run(
                    self._open, (lease,), self._config.environment.reward_timeout_s
                )
            except Exception as error:  # the environment's own
                for one in played:
                    one.error = error
            else:
                await self._play_attempts(problem, context, played)
        finally:
            await coalescer.close()
        if played and all(isinstance(one.error, PromptTooLongError) and one.error.first for one in played):
            raise cast(PromptTooLongError, played[0].error)
        return self._group(lease, played)

    def _open(self, lease: Lease) -> tuple[Problem, Messages | str | None]:
        """The environment's part before the first request; may block."""
        source = self._environment.eval_problem if lease.kind == "eval" else self._environment.problem
        problem = source(lease.problem_index)
        return problem, self._environment.opening(problem)

    async def _play_attempts(self, problem: Problem, context: GroupContext, played: list[_Played]) -> None:
        """Play all attempts, then those that failed again, up to the job's number of retries."""
        todo = list(range(len(played)))
        for retry in range(self._config.environment.attempt_retries + 1):
            await self._play_round(problem, context, played, todo, retry)
            todo = [
                number
                for number in todo
                if played[number].error is not None and not isinstance(played[number].error, NOT_RETRIED)
            ]
            if not todo:
                return
            if retry < self._config.environment.attempt_retries:
                self._metrics.attempt_retries.inc(len(todo))

    async def _play_round(
        self, problem: Problem, context: GroupContext, played: list[_Played], todo: list[int], retry: int
    ) -> None:
        limit = self._config.environment.rollout_timeout_s
        tasks = {number: asyncio.create_task(self._play_attempt(problem, context, number, retry)) for number in todo}
        try:
            _, late = await asyncio.wait(tasks.values(), timeout=limit)
        except asyncio.CancelledError:
            for task in tasks.values():
                task.cancel()
            # A rollout that swallows its cancellation must not keep the actor from ending.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(tasks.values(), timeout=CANCEL_GRACE_S)
            raise
        if late:
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=CANCEL_GRACE_S)
        for number, task in tasks.items():
            if task in late or task.cancelled():
                played[number] = _Played(error=TimeoutError(f"the rollout did not end within {limit:g} s"))
            else:
                played[number] = task.result()

    async def _play_attempt(self, problem: Problem, context: GroupContext, number: int, retry: int) -> _Played:
        client = RolloutClient(context, number, retry)
        try:
            reward = Reward.of(await self._environment.rollout(problem, client))
            if not client.recorder.histories:
                raise NoAnswerError("the rollout gave a reward, but the model has not sampled a single token for it")
        except Exception as error:  # whatever the environment raises costs this attempt only
            return _Played(error=error)
        return _Played(client.recorder, reward)

    def _group(self, lease: Lease, played: list[_Played]) -> Group:
        first = next((one.recorder for one in played if one.recorder is not None), None)
        prompt_ids: list[int] = []
        if first is not None:
            history = first.histories[0]
            prompt_ids = history.ids[: history.mask.index(True)]
        attempts = tuple(self._attempt(one, prompt_ids) for one in played)
        return Group(
            group_id=lease.group_id,
            fence=lease.fence,
            problem_index=lease.problem_index,
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            attempts=attempts,
            prompt_text=shorten(first.prompt_text) if first is not None else "",
        )

    def _attempt(self, one: _Played, prompt_ids: list[int]) -> Attempt:
        if one.recorder is None or one.reward is None:
            self._metrics.attempts.labels("failed").inc()
            error = "unknown" if one.error is None else describe_failure(one.error)
            return Attempt(status="failed", finish="error", error=error)
        attempt = Attempt(
            segments=build_segments(one.recorder.histories, prompt_ids),
            reward=one.reward.value,
            parts=one.reward.parts,
            finish=cast(FinishReason, one.recorder.finish),
            text=one.recorder.text(),
        )
        self._metrics.attempts.labels("ok").inc()
        self._metrics.sampled_tokens.inc(attempt.sampled_tokens)
        return attempt


def describe_failure(error: BaseException) -> str:
    """One line on why an attempt failed; our own errors speak for themselves, the environment's get their place."""
    if isinstance(error, (GenerationError, *NOT_RETRIED)):
        return shorten(str(error))
    return shorten(describe_error(error))
