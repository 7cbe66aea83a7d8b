"""What a user writes: an environment gives problems, plays them against the model, and says how good each attempt was.

The short form is :class:`SingleTurnEnvironment` (``problem``, ``messages``, ``reward``); the general form is
:class:`Environment` with an async ``rollout`` that may ask the model as often as it likes: ``docs/environments.md``.

Imports nothing heavy, so that a job file can be checked quickly.
"""

from __future__ import annotations

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from inflight_runtime.actor.shim import RolloutClient

Problem: TypeAlias = Any
"""Whatever the environment likes: a dict, a dataclass, a string."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Chat messages as in the OpenAI API: ``[{"role": "user", "content": "..."}]``."""


class RewardError(ValueError):
    """An environment returned something that is no reward."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for an answer.

    Attributes:
        tokens: its length.
        max_length: the model's longest sequence, prompt and answer together.
        first: it is the attempt's first prompt, so the problem as such does not fit.
    """

    def __init__(self, tokens: int, max_length: int, *, first: bool) -> None:
        what = "the prompt" if first else "the conversation"
        super().__init__(
            f"{what} has {tokens} tokens and the longest sequence is {max_length}, prompt and answer together"
        )
        self.tokens = tokens
        self.max_length = max_length
        self.first = first


@dataclass(frozen=True, slots=True)
class Reward:
    """How good one attempt was.

    Attributes:
        value: the scalar the advantage is computed from.
        parts: named numbers beside it, shown in the logs (mean per step), for instance ``{"exact": 1.0}``.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, returned: object) -> Reward:
        """Read what an environment returned: a number, a ``Reward``, or a dict with ``"reward"`` and further parts.

        Raises:
            RewardError: it is none of these, or not finite.
        """
        if isinstance(returned, Reward):
            reward = returned
        elif isinstance(returned, Mapping):
            parts = {str(name): _number(value, f"part {name!r}") for name, value in returned.items()}
            if "reward" not in parts:
                raise RewardError(f"the reward is a dict without the key 'reward' (it has {sorted(parts)})")
            return cls(parts.pop("reward"), parts)
        else:
            return cls(_number(returned, "the reward"))
        return cls(
            _number(reward.value, "the reward"),
            {str(name): _number(value, f"part {name!r}") for name, value in reward.parts.items()},
        )


def _number(value: object, what: str) -> float:
    try:
        number = float(cast(float, value))
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{what} is {value!r}, not a number: return a float, a Reward, or a dict with the key 'reward'"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}: rewards must be finite")
    return number


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the model.

    Attributes:
        text: the answer without special tokens.
        finish: ``stop`` when the model ended it (or a stop string did), ``length`` when the token budget ran out.
        token_ids: what was sampled, the end-of-sequence token included.
    """

    text: str
    finish: Literal["stop", "length"]
    token_ids: tuple[int, ...]


class Environment(ABC):
    """The general form. The job's ``environment.args`` are the constructor's keyword arguments.

    Problems come from one of two places:

    * ``self.problems = <a sequence>``, set in the constructor (a list, :class:`JsonlProblems`,
      :class:`HfDatasetProblems`): the run goes through it in shuffled epochs;
    * or an overridden :meth:`problem`, a pure function of the index: endless.

    Held-out problems, for ``spec.evaluation``, likewise: ``self.eval_problems`` or an overridden :meth:`eval_problem`.
    """

    problems: Sequence[Problem] | None = None
    eval_problems: Sequence[Problem] | None = None

    def problem(self, index: int) -> Problem:
        """Give training problem ``index``; the same index gives the same problem, in every process."""
        if self.problems is None:
            raise NotImplementedError(f"{type(self).__name__} neither sets self.problems nor overrides problem()")
        return self.problems[index]

    def eval_problem(self, index: int) -> Problem:
        """Give held-out problem ``index``."""
        if self.eval_problems is None:
            raise NotImplementedError(
                f"{type(self).__name__} neither sets self.eval_problems nor overrides eval_problem()"
            )
        return self.eval_problems[index]

    @abstractmethod
    async def rollout(self, problem: Problem, client: RolloutClient) -> Reward | float | Mapping[str, float]:
        """Play one attempt at ``problem`` and score it.

        Runs on the event loop beside many others: await what takes time, and hand blocking code to
        ``client.run_blocking(function, *args)``. An exception costs this attempt only.
        """

    def opening(self, problem: Problem) -> Messages | str | None:
        """What every attempt asks first, when that is known beforehand; computed once for a group."""
        return None

    def close(self) -> None:
        """Free what the environment holds; called once when the actor ends."""
        return


class SingleTurnEnvironment(Environment):
    """The short form: one prompt, one answer, one reward."""

    @abstractmethod
    def messages(self, problem: Problem) -> Messages | str:
        """Give the chat messages to send; a string is sent as it is, without the chat template."""

    @abstractmethod
    def reward(
        self, problem: Problem, answer: Answer
    ) -> float | Mapping[str, float] | Reward | Awaitable[float | Mapping[str, float] | Reward]:
        """Score an answer. May block: it runs in a thread with the job's ``rewardTimeoutSeconds``. May be async."""

    def opening(self, problem: Problem) -> Messages | str | None:
        """The only prompt there is."""
        return self.messages(problem)

    async def rollout(self, problem: Problem, client: RolloutClient) -> Reward | float | Mapping[str, float]:
        """Ask once, score once; what blocks shares one thread hop with the group's other attempts."""
        opening = client.opening
        answer = await client.ask(await client.run_blocking(self.messages, problem) if opening is None else opening)
        if inspect.iscoroutinefunction(self.reward):
            scored = await client.within_deadline(self.reward(problem, answer))
        else:
            scored = await client.run_blocking(self.reward, problem, answer)
        return cast("Reward | float | Mapping[str, float]", scored)


class JsonlProblems(Sequence[dict[str, Any]]):
    """The lines of a JSONL file, one object each; blank lines are skipped. Held in memory."""

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Args:
            path: the file; build it from ``Path(__file__).parent`` to have it found from any working directory.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is no JSON object (with its number), or there is none.
        """
        self._rows: list[dict[str, Any]] = []
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                self._rows.append(row)
        if not self._rows:
            raise ValueError(f"{path}: has no problems")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


class HfDatasetProblems(Sequence[dict[str, Any]]):
    """The rows of a Hugging Face dataset that was written with ``save_to_disk``; memory-mapped."""

    def __init__(self, path: str | Path, split: str | None = None) -> None:
        """Open the dataset.

        Args:
            path: the directory.
            split: which split, when the directory holds several.

        Raises:
            FileNotFoundError: there is no dataset.
            ValueError: the split is missing or has to be named.
        """
        import datasets  # noqa: PLC0415 - heavy, and most environments do without

        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            if split is None or split not in loaded:
                raise ValueError(f"{path}: name one of its splits {sorted(loaded)} (got {split!r})")
            loaded = loaded[split]
        elif split is not None:
            raise ValueError(f"{path}: holds a single split; leave out split={split!r}")
        if len(loaded) == 0:
            raise ValueError(f"{path}: has no problems")
        self._rows = loaded

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


ENDLESS_EVAL: Final = 2**31 - 1
"""Size told for an endless held-out split: the coordinator takes the first ``spec.evaluation.prompts`` of it."""


def dataset_sizes(environment: Environment) -> tuple[int | None, int]:
    """How many problems an environment offers: ``(training or None for endless, held-out or 0 for none)``."""
    return (
        None if environment.problems is None else len(environment.problems),
        _eval_size(environment),
    )


def _eval_size(environment: Environment) -> int:
    if environment.eval_problems is not None:
        return len(environment.eval_problems)
    return ENDLESS_EVAL if type(environment).eval_problem is not Environment.eval_problem else 0
