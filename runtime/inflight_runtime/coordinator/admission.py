"""How much may be in flight, and what becomes of a finished group. Pure functions, no I/O.

Counted in groups, with η = ``max_staleness``, B = groups per step and C = what the servers hold:
``leased + waiting <= (η + 1)·B`` and ``leased <= C`` (AReaL's rule, arXiv:2505.24298 section 5.1, in groups).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from inflight_runtime.config.roles import CoordinatorConfig, OverAge, ZeroVariance

MIN_SURVIVORS: Final = 2
"""A group-relative baseline needs two attempts."""

ATTEMPTS_FAILED: Final = "attempts_failed"
ZERO_VARIANCE: Final = "zero_variance"
OVER_AGE: Final = "over_age"
PROMPT_TOO_LONG: Final = "prompt_too_long"

NO_SERVER: Final = "no ready server"
STALENESS_BOUND: Final = "staleness bound"
SERVER_CAPACITY: Final = "server capacity"
ENOUGH_LEASED: Final = "enough groups are in flight to finish the run"


@dataclass(frozen=True, slots=True)
class Policy:
    """The job's numbers that admission and batching depend on."""

    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    over_age: OverAge = "keep"
    zero_variance: ZeroVariance = "keep"
    max_empty_batches: int = 50

    @classmethod
    def from_config(cls, config: CoordinatorConfig) -> Policy:
        """Take the policy out of a coordinator's config."""
        return cls(
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_staleness=config.max_staleness,
            over_age=config.over_age,
            zero_variance=config.zero_variance,
            max_empty_batches=config.max_empty_batches,
        )

    @property
    def bound(self) -> int:
        """(η + 1)·B: the most groups that may be leased or waiting."""
        return (self.max_staleness + 1) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class Load:
    """Where the groups are.

    Attributes:
        leased: groups in state ``leased``, whether somebody holds the lease or it waits to be leased again.
        requeued: those of them that nobody holds.
        completed: finished and in no batch yet.
        assigned: slots of batches that are made and not trained yet, with the slots that dropped groups have used.
        assigned_step: the newest step whose batch is made.
    """

    leased: int
    requeued: int
    completed: int
    assigned: int
    assigned_step: int

    @property
    def outstanding(self) -> int:
        """Leased + waiting."""
        return self.leased + self.completed + self.assigned

    @property
    def held(self) -> int:
        """Groups that an actor works on now."""
        return self.leased - self.requeued


@dataclass(frozen=True, slots=True)
class Room:
    """How many groups may be leased now: old ones (re-queued) first, then new ones; ``reason`` when there are none."""

    requeued: int
    new: int
    reason: str = ""


def server_cap(capacities: Iterable[int], group_size: int) -> int:
    """How many groups the usable servers generate at once: C, at least 1 when there is a server, else 0.

    Args:
        capacities: sequences that each READY or UPDATING server generates at once.
        group_size: attempts per group.
    """
    groups = [capacity // group_size for capacity in capacities]
    return max(1, sum(groups)) if groups else 0


def room(policy: Policy, load: Load, cap: int) -> Room:
    """Decide how many groups may be leased now.

    A re-queued group already counts as outstanding, so only the cap holds it back, and under η = 0 a batch that is not
    trained yet (only possible after a rollback): its answers must come from the weights that step will start from.
    """
    hands = cap - load.held
    if cap <= 0:
        return Room(0, 0, NO_SERVER)
    if hands <= 0:
        return Room(0, 0, SERVER_CAPACITY)
    if policy.max_staleness == 0 and load.assigned > 0:
        return Room(0, 0, STALENESS_BOUND)
    requeued = min(load.requeued, hands)
    needed = (policy.steps - load.assigned_step) * policy.groups_per_step - load.leased - load.completed
    free = policy.bound - load.outstanding
    new = max(0, min(hands - requeued, free, needed))
    reason = "" if requeued or new else (ENOUGH_LEASED if needed <= 0 else STALENESS_BOUND)
    return Room(requeued, new, reason)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a finished group is good for.

    Attributes:
        dropped: the reason it is dropped at once and its slot returned; empty when it goes on to a batch.
        excluded: the reason it will use a slot of its batch without being trained; empty when it may be trained.
    """

    dropped: str = ""
    excluded: str = ""


def judge(policy: Policy, survivors: int, rewards: Sequence[float]) -> Verdict:
    """Decide on a finished group by its surviving attempts' rewards.

    Rewards are compared exactly: a standard deviation of equal floats need not come out as zero.
    """
    if survivors < MIN_SURVIVORS:
        return Verdict(dropped=ATTEMPTS_FAILED)
    if policy.zero_variance != "keep" and all(reward == rewards[0] for reward in rewards):
        return Verdict(dropped=ZERO_VARIANCE) if policy.zero_variance == "refill" else Verdict(excluded=ZERO_VARIANCE)
    return Verdict()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A completed group as batching sees it."""

    group_id: int
    oldest_step: int
    excluded: str = ""


def exclusions(policy: Policy, step: int, candidates: Iterable[Candidate]) -> dict[int, str]:
    """Find the groups that use a slot of step ``step``'s batch without being trained: group id -> reason.

    Step ``s`` is trained from the weights of step ``s - 1``, so a token sampled at step ``t`` is ``s - 1 - t`` old.
    """
    found: dict[int, str] = {}
    for candidate in candidates:
        if candidate.excluded:
            found[candidate.group_id] = candidate.excluded
        elif policy.over_age == "drop" and (step - 1) - candidate.oldest_step > policy.max_staleness:
            found[candidate.group_id] = OVER_AGE
    return found
