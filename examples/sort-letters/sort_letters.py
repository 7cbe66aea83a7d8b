"""Sort three letters: `sort:hba` -> `abh`. Endless problems from an index; a held-out set that training never sees."""

from __future__ import annotations

import random
from itertools import product

from inflight_runtime.actor import Answer, Messages, Reward, SingleTurnEnvironment

ALPHABET = "abcdefgh"


class SortLetters(SingleTurnEnvironment):
    def __init__(self, letters: int = 3, seed: int = 0, held_out: int = 64) -> None:
        """letters: how many to sort. seed: of the problems. held_out: strings kept for evaluation."""
        everything = ["".join(letters) for letters in product(ALPHABET, repeat=letters)]
        random.Random(0).shuffle(everything)  # the same split for every seed, so that runs can be compared
        self.eval_problems = everything[:held_out]
        self.training = everything[held_out:]
        self.seed = seed

    def problem(self, index: int) -> str:
        return random.Random(f"{self.seed}/{index}").choice(self.training)

    def messages(self, problem: str) -> Messages:
        return [{"role": "user", "content": f"sort:{problem}"}]

    def reward(self, problem: str, answer: Answer) -> Reward:
        """Half for letters in the right place, half for the whole; nothing for an answer that does not end."""
        right = "".join(sorted(problem))
        if answer.finish != "stop":
            return Reward(0.0, {"exact": 0.0})
        exact = float(answer.text == right)
        placed = sum(a == b for a, b in zip(answer.text, right, strict=False)) / max(len(answer.text), len(right))
        return Reward(0.5 * placed + 0.5 * exact, {"exact": exact})
