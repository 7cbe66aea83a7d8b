"""An environment of the tests: sort letters, where some problems take long after their answer was sampled."""

from __future__ import annotations

import asyncio
from typing import Any

from inflight_runtime.actor import Answer, Messages, Reward, SingleTurnEnvironment


class SlowLetters(SingleTurnEnvironment):
    """Every `slow_every`-th problem's first attempt ends `delay_s` seconds late."""

    def __init__(self, slow_every: int, delay_s: float) -> None:
        self.slow_every = slow_every
        self.delay_s = delay_s

    def problem(self, index: int) -> int:
        return index

    def messages(self, problem: int) -> Messages:
        letters = "".join("abcdefgh"[(problem * k) % 8] for k in (3, 5, 7))
        return [{"role": "user", "content": f"sort:{letters}"}]

    async def rollout(self, problem: int, client: Any) -> Reward:
        reward = await super().rollout(problem, client)
        if problem % self.slow_every == 0:
            await asyncio.sleep(self.delay_s)
        return reward

    def reward(self, problem: int, answer: Answer) -> float:
        return (sum(map(ord, answer.text)) % 7) / 7
