"""The staleness bound over whole runs, on the reference engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import check_ledger, local_run, sort_letters_job, watch_outstanding

STEPS = 12
GROUPS = 4
HERE = Path(__file__).parent


def test_outstanding_groups_never_exceed_the_bound(letters_model: Path, tmp_path: Path) -> None:
    """For a bound of 4; a bound of 1 is watched below, a bound of 0 in the comparison with a synchronous loop."""
    job = sort_letters_job(letters_model, steps=STEPS, promptsPerStep=GROUPS, maxStaleness=4, zeroVariance="keep")
    with local_run(job, tmp_path) as run:
        watch_outstanding(run, bound=5 * GROUPS)
        run.succeed()
        check_ledger(run, steps=STEPS, groups_per_step=GROUPS)


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
        watch_outstanding(run, bound=2 * GROUPS)
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
