"""An environment of the tests: sort letters, where some problems take long after their answer was sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from inflight_runtime.actor import Answer, Messages, Reward, SingleTurnEnvironment


class SlowLetters(SingleTurnEnvironment):
    """Every `slow_every`-th problem is `delay_s` seconds late; with `switch` only while there is that file."""

    def __init__(self, slow_every: int, delay_s: float, switch: str = "") -> None:
        self.slow_every = slow_every
        self.delay_s = delay_s
        self.switch = switch

    def problem(self, index: int) -> int:
        return index

    def messages(self, problem: int) -> Messages:
        letters = "".join("abcdefgh"[(problem * k) % 8] for k in (3, 5, 7))
        return [{"role": "user", "content": f"sort:{letters}"}]

    def is_slow(self, problem: int) -> bool:
        return problem % self.slow_every == 0 and (not self.switch or Path(self.switch).exists())

    async def rollout(self, problem: int, client: Any) -> Reward:
        reward = await super().rollout(problem, client)
        if self.is_slow(problem):
            await asyncio.sleep(self.delay_s)
        return reward

    def reward(self, problem: int, answer: Answer) -> float:
        return (sum(map(ord, answer.text)) % 7) / 7
