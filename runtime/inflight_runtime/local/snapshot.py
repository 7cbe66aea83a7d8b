"""What is shown of a run at one moment, gathered from the coordinator's state and the supervisor's."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from inflight_runtime.local.supervisor import RoleStatus
from inflight_runtime.protocol import RunState

RATE_WINDOW_S: Final = 10.0
SERVING: Final = ("READY", "UPDATING")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a run.

    Attributes:
        job: the job's name.
        phase: what the executor is doing, in a word or two.
        elapsed_s: seconds since the run began.
        state: the coordinator's newest answer; ``None`` before the first.
        silent_s: seconds since that answer.
        steps_per_s: optimizer steps per second over the last :data:`RATE_WINDOW_S`; ``None`` before two are known.
        roles: the processes.
    """

    job: str
    phase: str
    elapsed_s: float
    state: RunState | None = None
    silent_s: float = 0.0
    steps_per_s: float | None = None
    roles: Sequence[RoleStatus] = field(default_factory=tuple)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step if self.state else 0

    @property
    def steps(self) -> int:
        """Optimizer steps wanted; 0 before the coordinator has answered."""
        return self.state.steps if self.state else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate."""
        if not self.steps_per_s or self.step >= self.steps:
            return None
        return (self.steps - self.step) / self.steps_per_s

    @property
    def serving(self) -> int:
        """Servers that generate."""
        return sum(member.state in SERVING for member in self.state.members) if self.state else 0

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by role, those that had any."""
        return {role.name: role.restarts for role in self.roles if role.restarts}

    def metric(self, name: str) -> float | None:
        """Get a number of the newest step, ``None`` when it is not there or not finite."""
        return finite(self.state.metrics, name) if self.state else None

    @property
    def reward_parts(self) -> dict[str, float]:
        """The named parts of the reward."""
        return parts_of(self.state.metrics) if self.state else {}


class Tracker:
    """Takes in the coordinator's answers and computes rates.

    Args:
        job: the job's name.
        clock: seconds, monotonic.
    """

    def __init__(self, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._began = clock()
        self._state: RunState | None = None
        self._answered = self._began
        self._steps: deque[tuple[float, int]] = deque()
        self.phase = "starting"

    @property
    def state(self) -> RunState | None:
        """The newest answer."""
        return self._state

    def answered(self, state: RunState) -> None:
        """Take in an answer."""
        now = self._clock()
        if self._steps and state.step < self._steps[-1][1]:
            self._steps.clear()  # rolled back to a checkpoint
        self._state, self._answered = state, now
        self._steps.append((now, state.step))
        while now - self._steps[0][0] > RATE_WINDOW_S and len(self._steps) > 2:
            self._steps.popleft()

    def snapshot(self, roles: Sequence[RoleStatus] = ()) -> Snapshot:
        """Get this moment."""
        now = self._clock()
        return Snapshot(
            job=self._job,
            phase=self.phase,
            elapsed_s=now - self._began,
            state=self._state,
            silent_s=now - self._answered if self._state else 0.0,
            steps_per_s=self._rate(),
            roles=tuple(roles),
        )

    def _rate(self) -> float | None:
        if len(self._steps) < 2:
            return None
        (begin, first), (end, last) = self._steps[0], self._steps[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None


def finite(metrics: Mapping[str, float], name: str) -> float | None:
    """Get a metric if it is there and finite."""
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def parts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Get the metrics ``reward/<part>`` by part."""
    return {
        name.removeprefix("reward/"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and math.isfinite(value)
    }
