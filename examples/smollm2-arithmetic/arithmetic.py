"""One-digit sums, asked the chat model's way: a system message, one worked example, the question."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from inflight_runtime.actor import Answer, Messages, Reward, SingleTurnEnvironment


@dataclass(frozen=True)
class Sum:
    left: int
    right: int


class Arithmetic(SingleTurnEnvironment):
    def __init__(self, largest: int = 9, seed: int = 0) -> None:
        """largest: of both summands. seed: of the problems."""
        self.largest = largest
        self.seed = seed

    def problem(self, index: int) -> Sum:
        draw = random.Random(f"{self.seed}/{index}")
        return Sum(draw.randint(1, self.largest), draw.randint(1, self.largest))

    def messages(self, problem: Sum) -> Messages:
        # Without the worked example the model talks instead of answering, and every reward is zero.
        return [
            {"role": "system", "content": "Calculator."},
            {"role": "user", "content": "2+3="},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": f"{problem.left}+{problem.right}="},
        ]

    def reward(self, problem: Sum, answer: Answer) -> Reward:
        """1 for the right number and nothing else, 0.3 for any bare number; nothing for an answer that does not end."""
        text = answer.text.strip().rstrip(".")
        number = answer.finish == "stop" and re.fullmatch(r"\d+", text) is not None
        exact = number and text == str(problem.left + problem.right)
        return Reward(1.0 if exact else 0.3 if number else 0.0, {"exact": float(exact), "number": float(number)})
