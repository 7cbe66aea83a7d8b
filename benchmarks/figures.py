"""What is computed from a run's raw records. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]
Interval = tuple[float, float]


class TooLittleDataError(ValueError):
    """A figure has nothing to be computed from; the message says which and what is missing."""


def percentile(values: Iterable[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between the two nearest ranks as numpy's default.

    Raises:
        TooLittleDataError: there are no values.
        ValueError: ``q`` is out of bounds.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q}: must be from 0 to 100")
    ordered = sorted(values)
    if not ordered:
        raise TooLittleDataError(f"percentile {q:g} of no values")
    position = (len(ordered) - 1) * q / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Median, 95th percentile and maximum, with the number of values.

    Raises:
        TooLittleDataError: there are no values.
    """
    return {
        "p50": round(percentile(values, 50), digits),
        "p95": round(percentile(values, 95), digits),
        "max": round(max(values), digits),
        "count": len(values),
    }


@dataclass(frozen=True, slots=True)
class Progress:
    """Training over a window, from the end of its first record to the end of its last.

    Attributes:
        steps: optimizer steps in it; the first record's own is not one of them.
        seconds: its length.
        completions: attempts trained on in it, failed ones included.
        tokens: sampled tokens trained on.
        waited: seconds the trainer waited for a batch.
    """

    steps: int
    seconds: float
    completions: float
    tokens: float
    waited: float

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps a second."""
        return self.steps / self.seconds

    @property
    def completions_per_second(self) -> float:
        """Attempts a second."""
        return self.completions / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second."""
        return self.tokens / self.seconds

    @property
    def wait_share(self) -> float:
        """Part of the time that the trainer waited for data, 0 to 1."""
        return self.waited / self.seconds


def progress(records: Sequence[Record], since: float, until: float) -> Progress:
    """Sum up a run's step records (``metrics.jsonl``) that were written from ``since`` to ``until`` (Unix times).

    Raises:
        TooLittleDataError: fewer than two of them lie there.
    """
    inside = [record for record in records if since <= record["time"] <= until]
    if len(inside) < 2 or inside[-1]["time"] <= inside[0]["time"]:
        raise TooLittleDataError(
            f"only {len(inside)} steps ended within {until - since:.0f} s: the window is too short"
        )
    counted = inside[1:]
    return Progress(
        steps=len(counted),
        seconds=inside[-1]["time"] - inside[0]["time"],
        completions=sum(record["attempts"] + record["attempts_failed"] for record in counted),
        tokens=sum(record["tokens_sampled"] for record in counted),
        waited=sum(record["wait_seconds"] for record in counted),
    )


def update_interval(update: Record) -> Interval:
    """From the begin to the end of a weight update of ``updates.jsonl``, in Unix time."""
    return update["time"], update["time"] + update["update_ms"] / 1e3


def gaps(arrivals: Sequence[float]) -> list[float]:
    """Seconds between neighbouring tokens of one stream."""
    return [later - earlier for earlier, later in pairwise(arrivals)]


def gap_over(arrivals: Sequence[float], interval: Interval) -> float | None:
    """The longest gap of a stream that overlaps ``interval``.

    ``None`` unless the stream was under way during the whole interval: its first and last token enclose it.
    """
    begin, end = interval
    if len(arrivals) < 2 or arrivals[0] > begin or arrivals[-1] < end:
        return None
    return max(later - earlier for earlier, later in pairwise(arrivals) if later >= begin and earlier <= end)


def longest_gaps(streams: Iterable[Sequence[float]], intervals: Iterable[Interval]) -> list[float]:
    """For each interval the longest gap over all streams under way during it; intervals without a stream are left out.

    Args:
        streams: arrival times of the tokens of each stream.
        intervals: begin and end of each update, on the same clock.
    """
    streams = list(streams)
    found = []
    for interval in intervals:
        over = [gap for stream in streams if (gap := gap_over(stream, interval)) is not None]
        if over:
            found.append(max(over))
    return found


def intervals_between(intervals: Sequence[Interval]) -> list[Interval]:
    """For each pause between two intervals one of the length of the first, in its middle, if it fits there.

    The same statistic over these says what the gaps are without an update.
    """
    found = []
    for (begin, end), (following, _) in pairwise(sorted(intervals)):
        length = end - begin
        if following - end > length:
            middle = (end + following) / 2
            found.append((middle - length / 2, middle + length / 2))
    return found


def share_of_machine(cpu_seconds: float, wall_seconds: float, cores: int) -> float:
    """CPU time as a part of all that the cores could have given, 0 to 1.

    Raises:
        TooLittleDataError: no time has passed.
    """
    if wall_seconds <= 0 or cores < 1:
        raise TooLittleDataError(f"a share over {wall_seconds} s of {cores} cores")
    return cpu_seconds / (wall_seconds * cores)


def speed_ratio(asynchronous: Sequence[float], synchronous: Sequence[float]) -> float:
    """How many times faster: the means of the repetitions' steps per second, divided.

    Raises:
        TooLittleDataError: a side is empty or stands still.
    """
    if not asynchronous or not synchronous or fmean(synchronous) <= 0:
        raise TooLittleDataError("a ratio needs both sides, and a synchronous run that moves")
    return fmean(asynchronous) / fmean(synchronous)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that the project sets itself for the demo.

    Attributes:
        name: what is bounded, with its unit.
        least: the value must be at least this.
        most: the value must be at most this.
    """

    name: str
    least: float | None = None
    most: float | None = None

    def judge(self, value: float) -> dict[str, Any]:
        """The measured value beside the bound, and whether it is met."""
        bound = {"at_least": self.least} if self.least is not None else {"at_most": self.most}
        low = self.least is None or value >= self.least
        high = self.most is None or value <= self.most
        return {"measured": value, **bound, "met": low and high}


TARGETS = (
    Target("steps_per_second", least=4),
    Target("completions_per_second", least=500),
    Target("update_ms_p95", most=60),
    Target("token_gap_ms_p95_in_demo", most=40),
    Target("token_gap_ms_p95_of_streams", most=40),
    Target("coordinator_share_of_machine_cpu", most=0.15),
    Target("server_pss_mb", most=1800),
    Target("coordinator_pss_mb", most=300),
)


def judge_targets(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Every target with its measured value.

    Raises:
        KeyError: a target was not measured.
    """
    return {target.name: target.judge(values[target.name]) for target in TARGETS}
