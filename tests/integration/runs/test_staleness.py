"""The staleness bound over whole runs, on the reference engine."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from support.runs import LocalRun, check_ledger, local_run, sort_letters_job

STEPS = 12
GROUPS = 4
HERE = Path(__file__).parent


def watch_capacity(run: LocalRun, timeout_s: float = 180.0) -> list[tuple[int, int]]:
    """(outstanding, bound) as often as the coordinator tells, until the run ends."""
    seen = []
    deadline = time.monotonic() + timeout_s
    while run.process.poll() is None:
        assert time.monotonic() < deadline, run.logs()
        with contextlib.suppress(OSError, ValueError, KeyError):
            capacity = run.state().capacity
            seen.append((capacity["outstanding"], capacity["bound"]))
        time.sleep(0.02)
    return seen


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_outstanding_groups_never_exceed_the_bound(staleness: int, letters_model: Path, tmp_path: Path) -> None:
    job = sort_letters_job(
        letters_model, steps=STEPS, promptsPerStep=GROUPS, maxStaleness=staleness, zeroVariance="keep"
    )
    with local_run(job, tmp_path) as run:
        seen = watch_capacity(run)
        run.succeed()
        assert {bound for _, bound in seen} == {(staleness + 1) * GROUPS}
        assert max(outstanding for outstanding, _ in seen) > 0
        assert all(outstanding <= bound for outstanding, bound in seen)
        check_ledger(run, steps=STEPS, groups_per_step=GROUPS)
        if staleness == 0:
            assert max(record["staleness_max"] for record in run.metrics()) == 0


@pytest.mark.parametrize("policy", ["drop", "mask", "keep"])
def test_what_is_older_than_the_bound_is_dropped_masked_or_kept_as_asked(
    policy: str, letters_model: Path, tmp_path: Path
) -> None:
    job = sort_letters_job(
        letters_model, steps=STEPS, promptsPerStep=GROUPS, maxStaleness=1, overAge=policy, zeroVariance="keep"
    )
    # Long enough that the steps of one group's life outnumber the bound: other groups overtake it.
    job["spec"]["environment"] = {"entrypoint": "slow_letters:SlowLetters", "args": {"slow_every": 9, "delay_s": 3.0}}
    (tmp_path / "slow_letters.py").write_text((HERE / "slow_letters.py").read_text())
    with local_run(job, tmp_path) as run:
        run.succeed()
        metrics = run.metrics()
        over_age = sum(record["over_age_tokens"] for record in metrics)
        oldest = max(record["staleness_max"] for record in metrics)
        counted = check_ledger(run, steps=STEPS, groups_per_step=GROUPS)
        if policy == "drop":
            assert over_age == 0
            assert oldest <= 1
            assert counted["dropped"] > 0, "no group was late: the test did not test anything"
        else:
            assert over_age > 0, "no token was late: the test did not test anything"
            assert oldest > 1
            assert sum(record["tokens_trained"] for record in metrics) == sum(
                record["tokens_sampled"] - (record["over_age_tokens"] if policy == "mask" else 0) for record in metrics
            )
