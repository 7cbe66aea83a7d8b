"""Answers of long-tailed length: most are short, a few are very long, as those of a model that reasons.

The model of this benchmark never ends an answer by itself, so the length is what is asked for: log-normal, drawn for
each attempt. The reward is of no interest, only that it varies: the share of letters in the answer.
"""

from __future__ import annotations

import asyncio
import random

from inflight_runtime.actor import Environment, Reward
from inflight_runtime.actor.shim import RolloutClient

ALPHABET = "abcdefgh"


class LongTailed(Environment):
    def __init__(self, median: float = 16, sigma: float = 1.2, longest: int = 768, pause_s: float = 0.0) -> None:
        """median: of the length in tokens. sigma: of its logarithm. longest: what is cut off beyond.

        pause_s: seconds that an attempt takes besides its answer.
        """
        self.median = median
        self.sigma = sigma
        self.longest = longest
        self.pause_s = pause_s

    def problem(self, index: int) -> str:
        return "".join(random.Random(index).choices(ALPHABET, k=3))

    def length(self, rng: random.Random) -> int:
        return max(1, min(self.longest, round(self.median * rng.lognormvariate(0, self.sigma))))

    async def rollout(self, problem: str, client: RolloutClient) -> Reward:
        await asyncio.sleep(self.pause_s)
        messages = [{"role": "user", "content": f"sort:{problem}"}]
        answer = await client.ask(messages, max_tokens=self.length(client.rng))
        letters = sum(character.isalpha() for character in answer.text)
        return Reward(letters / len(answer.token_ids), {"length": float(len(answer.token_ids))})
