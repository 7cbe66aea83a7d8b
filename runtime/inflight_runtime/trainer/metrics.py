"""Numbers of a step, and the files they go to: ``metrics.jsonl``, ``rollouts.jsonl``, TensorBoard."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from inflight_runtime.trainer.batching import StepData
from inflight_runtime.trainer.logfiles import Board, LineFile
from inflight_runtime.types import Attempt

TENSORBOARD_INTERVAL_S: Final = 1.0
"""Steps that follow each other faster are not all written: it costs as much as a tiny step's optimizer."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each named part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def batch_metrics(data: StepData) -> dict[str, float]:
    """What can be said of a batch before it is trained on.

    Rewards and their parts are over surviving attempts (a part, over those that report it), staleness over sampled
    tokens, ``zero_variance_fraction`` over groups.
    """
    rewards = [np.asarray([attempt.reward for attempt in group.survivors]) for group in data.groups]
    advantages = np.asarray([record.advantage for records in data.records for record in records])
    flat = np.concatenate(rewards) if rewards else np.zeros(0)
    records = [record for group in data.records for record in group]
    parts: dict[str, list[float]] = defaultdict(list)
    for group in data.groups:
        for attempt in group.survivors:
            for name, value in attempt.parts.items():
                parts[name].append(value)
    tokens = max(data.tokens_sampled, 1)
    return {
        "reward_mean": float(flat.mean()) if len(flat) else 0.0,
        "reward_std": float(flat.std()) if len(flat) else 0.0,
        **{f"reward/{name}": float(np.mean(values)) for name, values in sorted(parts.items())},
        "advantage_std": float(advantages.std()) if len(advantages) else 0.0,
        "zero_variance_fraction": float(np.mean([float(np.ptp(r) == 0) if len(r) else 1.0 for r in rewards] or [0.0])),
        "groups": len(data.groups),
        "groups_excluded": sum(data.excluded.values()),
        "attempts": len(flat),
        "attempts_failed": sum(len(group.attempts) for group in data.groups) - len(flat),
        "staleness_mean": sum(record.staleness_mean * record.tokens for record in records) / tokens,
        "staleness_max": max((record.staleness_max for record in records), default=0),
        "over_age_tokens": data.over_age_tokens,
        "tokens_sampled": data.tokens_sampled,
        "tokens_trained": sum(len(sequence.sampled) for sequences in data.sequences for sequence in sequences),
    }


def rollout_lines(data: StepData, limit: int) -> Iterator[dict[str, Any]]:
    """Up to ``limit`` attempts as people read them, whole groups first to last, failed attempts included."""
    for group, records in zip(data.groups, data.records, strict=True):
        by_number = {record.attempt: record for record in records}
        for number, attempt in enumerate(group.attempts):
            if limit <= 0:
                return
            limit -= 1
            record = by_number.get(number)
            yield {
                "step": data.step,
                "group": group.group_id,
                "attempt": number,
                "problem": group.problem_index,
                "prompt": group.prompt_text,
                "text": attempt.text,
                "reward": attempt.reward,
                "parts": attempt.parts,
                "advantage": record.advantage if record else None,
                "versions": versions(attempt),
                "staleness": round(record.staleness_mean, 3) if record else None,
                "tokens": attempt.sampled_tokens,
                "status": attempt.status,
                "finish": attempt.finish,
            } | ({"error": attempt.error} if attempt.error else {})


def versions(attempt: Attempt) -> list[str]:
    """The versions that sampled an attempt, in order of appearance."""
    return list(dict.fromkeys(str(span.version) for span in attempt.spans()))


class RunLog:
    """The files of a run's log directory. Appends: a resumed run goes on in the same files, under its own epoch."""

    def __init__(self, directory: Path, *, first_step: int, rollouts_per_step: int) -> None:
        """Open the files.

        Args:
            directory: made if it is not there.
            first_step: step that comes next; what TensorBoard has from there on belongs to a lost timeline.
            rollouts_per_step: most attempts written of each step.

        Raises:
            OSError: the directory cannot be written to.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = LineFile(directory / "metrics.jsonl")
        self._rollouts = LineFile(directory / "rollouts.jsonl")
        self._updates = LineFile(directory / "updates.jsonl")
        self._limit = rollouts_per_step
        self._board = Board(directory / "tensorboard", first_step)
        self._board_due = 0.0

    def step(self, data: StepData, metrics: dict[str, float]) -> None:
        """Write one step."""
        self._rollouts.write(*rollout_lines(data, self._limit))
        self._metrics.write(metrics)
        if time.monotonic() >= self._board_due:
            self._board_due = time.monotonic() + TENSORBOARD_INTERVAL_S
            self._to_board(metrics)

    def update(self, entry: dict[str, Any]) -> None:
        """Write one weight update of one server (called by the publisher, in its own thread)."""
        self._updates.write(entry)

    def close(self, last: dict[str, float] | None) -> None:
        """Write the last step's numbers to TensorBoard whatever the interval, and close everything."""
        if last is not None:
            self._to_board(last)
        for file in (self._board, self._metrics, self._rollouts, self._updates):
            file.close()

    def _to_board(self, metrics: dict[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if name not in {"step", "epoch", "time"}}
        self._board.scalars(int(metrics["step"]), shown)
