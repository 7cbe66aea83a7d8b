"""Products of two numbers: the model may think aloud, and the last number it writes is its answer."""

from __future__ import annotations

import random
import re

from inflight_runtime.actor import Answer, Messages, Reward, SingleTurnEnvironment

Problem = tuple[int, int]


class Products(SingleTurnEnvironment):
    def __init__(self, digits: int = 2, seed: int = 0) -> None:
        """digits: of both factors. seed: of the problems."""
        self.smallest = 10 ** (digits - 1)
        self.seed = seed

    def problem(self, index: int) -> Problem:
        return self._draw(f"{self.seed}/{index}")

    def eval_problem(self, index: int) -> Problem:
        return self._draw(f"{self.seed}/held-out/{index}")

    def messages(self, problem: Problem) -> Messages:
        left, right = problem
        return [{"role": "user", "content": f"What is {left} times {right}? Think step by step; end with the number."}]

    def reward(self, problem: Problem, answer: Answer) -> Reward:
        """1 for the right number at the end of an answer that ends; nothing else."""
        left, right = problem
        numbers = re.findall(r"\d+", answer.text.replace(",", ""))
        exact = answer.finish == "stop" and bool(numbers) and int(numbers[-1]) == left * right
        return Reward(float(exact), {"exact": float(exact), "ended": float(answer.finish == "stop")})

    def _draw(self, key: str) -> Problem:
        draw = random.Random(key)
        return draw.randint(self.smallest, 10 * self.smallest - 1), draw.randint(self.smallest, 10 * self.smallest - 1)
