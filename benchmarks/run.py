"""Measures real runs of the example on this machine and prints one JSON object: ``python benchmarks/run.py [--quick]``.

What each figure means stands in ``docs/measurements.md``. A missed target is reported and fails nothing; a run that
fails ends the benchmark with exit code 1. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import (
    Progress,
    TooLittleDataError,
    gaps,
    intervals_between,
    judge_targets,
    longest_gaps,
    percentile,
    progress,
    share_of_machine,
    speed_ratio,
    spread,
    update_interval,
)
from jobs import common_overrides, example_job, long_tailed_job, slow_overrides
from local_runs import STEADY_AFTER, BenchRun, RunFailedError, Window, bench_run
from machine_facts import environment_facts, tell, usable_cores
from streams import Stream, StreamFailedError, record_streams

ASYNC, SYNC = 4, 0
"""``maxStaleness`` of the two sides."""
STREAM_TOKENS = 700
DEMO_STREAMS, LONE_STREAMS = 4, 2
"""Generations in flight on each server: beside the demo, whose servers are full without them, and by themselves."""
MEMORY_EVERY_S = 5.0
FEWEST_STEPS = 6
"""A window is longer than planned where it would have fewer; its first step only begins the time."""
STANDSTILL_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long what is measured, in seconds.

    Attributes:
        demo_s: the demo, undisturbed.
        streams_s: then the same run with streams beside; as long, streams by themselves.
        short_s: each further run of the example.
        long_s: each run with long-tailed answers.
        short_order, long_order: ``maxStaleness`` of the runs of a comparison, one after the other. One side frames the
            other, so that a machine that gets slower or faster meanwhile weighs on both alike. The first of
            ``short_order`` is the demo.
    """

    demo_s: float
    streams_s: float
    short_s: float
    long_s: float
    short_order: tuple[int, ...]
    long_order: tuple[int, ...]


FULL = Plan(25, 12, 12, 18, short_order=(ASYNC, SYNC, ASYNC), long_order=(SYNC, ASYNC, SYNC))
QUICK = Plan(10, 6, 7, 8, short_order=(ASYNC, SYNC), long_order=(ASYNC, SYNC))


def say(text: str) -> None:
    print(f"bench {time.strftime('%T')}: {text}", file=sys.stderr, flush=True)


# --- one run ----------------------------------------------------------------------------------------------------------


def train_for(run: BenchRun, seconds: float, every: Callable[[], None] = lambda: None) -> None:
    """Let a run go on for some time and at least some steps, and do something now and then.

    Raises:
        RunFailedError: it ended, or hardly moves.
    """
    begin, enough = time.monotonic(), run.steps() + FEWEST_STEPS
    while (passed := time.monotonic() - begin) < seconds or run.steps() < enough:
        run.check()
        if passed > seconds + STANDSTILL_S:
            raise run.failure(f"did not do {FEWEST_STEPS} steps within {passed:.0f} s")
        every()
        time.sleep(min(MEMORY_EVERY_S, max(0.2, seconds - passed)))


def trained(run: BenchRun, window: Window) -> Progress:
    """What the trainer did in a window.

    Raises:
        RunFailedError: next to nothing.
    """
    try:
        return progress(run.records("metrics.jsonl"), window.begin, window.end)
    except TooLittleDataError as error:
        raise run.failure(f"stands still: {error}") from error


def show_progress(name: str, done: Progress, window: Window) -> dict[str, Any]:
    """The figures of one run for the comparison."""
    others = share_of_machine(window.others_cpu_s, window.seconds, usable_cores())
    say(f"{name}: {done.steps_per_second:.2f} steps/s over {done.steps} steps (others took {others:.0%} of the CPU)")
    return {
        "steps_per_second": round(done.steps_per_second, 3),
        "completions_per_second": round(done.completions_per_second, 1),
        "tokens_per_second": round(done.tokens_per_second, 1),
        "trainer_wait_share": round(done.wait_share, 3),
        "steps": done.steps,
        "seconds": round(done.seconds, 2),
        "others_share_of_machine_cpu": round(others, 3),
    }


def measure_speed(name: str, job: Path, scratch: Path, staleness: int, seconds: float) -> dict[str, Any]:
    """One run of a comparison.

    Raises:
        RunFailedError: it failed.
    """
    say(f"{name}: starting")
    with bench_run(name, job, scratch, common_overrides(staleness)) as run:
        roles = run.wait_until_steady()
        window = run.measure(roles, lambda: train_for(run, seconds))
        done = trained(run, window)
        run.stop()
    return show_progress(name, done, window)


def measure_demo(scratch: Path, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The demo: first as it is, then with long streams beside it; returns its figures and those for the comparison.

    Raises:
        RunFailedError: it failed.
        StreamFailedError: a stream did.
    """
    say("demo: starting")
    streams: list[Stream] = []
    with bench_run("demo", example_job(), scratch, common_overrides(ASYNC)) as run:
        roles = run.wait_until_steady()
        window = run.measure(roles, lambda: train_for(run, plan.demo_s, roles.sample_memory))
        say("demo: streams beside")
        beside = run.measure(
            roles,
            lambda: streams.extend(
                record_streams(run.directory, per_server=DEMO_STREAMS, tokens=STREAM_TOKENS, seconds=plan.streams_s)
            ),
        )
        roles.sample_memory()
        done, done_beside = trained(run, window), trained(run, beside)
        steps = [record for record in run.records("metrics.jsonl") if window.begin <= record["time"] <= window.end]
        updates = run.records("updates.jsonl")
        speed = show_progress("demo", done, window)
        try:
            figures = {
                **speed,
                "step_ms": spread([1e3 * record["step_seconds"] for record in steps]),
                "trainer_shares": trainer_shares(steps),
                "staleness_mean": round(sum(record["staleness_mean"] for record in steps) / len(steps), 2),
                **update_figures(updates, window),
                "token_gap_ms": token_gaps(streams, [update for update in updates if update["ok"]]),
                "steps_per_second_beside_streams": round(done_beside.steps_per_second, 3),
                "cpu": cpu_shares(window),
                "memory_pss_mb": {name: round(size / 1e6, 1) for name, size in sorted(roles.peak_pss.items())},
            }
        except TooLittleDataError as error:
            raise run.failure(f"cannot be judged: {error}") from error
        run.stop()
    return figures, speed


def measure_streams(scratch: Path, job: Path, seconds: float) -> dict[str, Any]:
    """Long streams on two servers that the trainer updates about three times a second and that have no other work.

    Raises:
        RunFailedError: the run failed.
        StreamFailedError: a stream did.
    """
    say("streams: starting")
    streams: list[Stream] = []
    with bench_run("streams", job, scratch, [*common_overrides(ASYNC), *slow_overrides()]) as run:
        roles = run.wait_until_steady()
        window = run.measure(
            roles,
            lambda: streams.extend(
                record_streams(run.directory, per_server=LONE_STREAMS, tokens=STREAM_TOKENS, seconds=seconds)
            ),
        )
        updates = run.records("updates.jsonl")
        try:
            figures = {
                "token_gap_ms": token_gaps(streams, [update for update in updates if update["ok"]]),
                **update_figures(updates, window),
                "others_share_of_machine_cpu": round(
                    share_of_machine(window.others_cpu_s, window.seconds, usable_cores()), 3
                ),
            }
        except TooLittleDataError as error:
            raise run.failure(f"cannot be judged: {error}") from error
        run.stop()
    return figures


# --- figures ----------------------------------------------------------------------------------------------


def trainer_shares(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Part of the trainer's time in each section of a step."""
    names = [name for name in steps[0] if name.endswith("_seconds") and name != "step_seconds"]
    total = sum(record["step_seconds"] for record in steps)
    return {name.removesuffix("_seconds"): round(sum(r[name] for r in steps) / total, 3) for name in names}


def update_figures(updates: list[dict[str, Any]], window: Window) -> dict[str, Any]:
    """Times of the weight updates that ended well within the window."""
    inside = [update for update in updates if window.begin <= update["time"] <= window.end]
    good = [update for update in inside if update["ok"]]
    return {
        "update_ms": spread([update["update_ms"] for update in good]),
        "update_receive_ms": spread([update["receive_ms"] for update in good]),
        "update_pause_ms": spread([update["pause_ms"] for update in good]),
        "updates_failed": len(inside) - len(good),
        "versions_skipped": sum(update["skipped"] for update in good),
    }


def token_gaps(streams: list[Stream], updates: list[dict[str, Any]]) -> dict[str, Any]:
    """Gaps between tokens of the streams in milliseconds: over each update of their server, between updates, of all."""
    over: list[float] = []
    between: list[float] = []
    for server in sorted({stream.server_id for stream in streams}):
        arrivals = [stream.arrivals for stream in streams if stream.server_id == server]
        intervals = [update_interval(update) for update in updates if update["server"] == server]
        over += longest_gaps(arrivals, intervals)
        between += longest_gaps(arrivals, intervals_between(intervals))
    every = [gap for stream in streams for gap in gaps(stream.arrivals)]
    return {
        "over_updates": spread([1e3 * gap for gap in over]),
        "between_updates": spread([1e3 * gap for gap in between]) if between else None,
        "median": round(1e3 * percentile(every, 50), 2),
        "streams": len(streams),
        "tokens": sum(len(stream.arrivals) for stream in streams),
    }


def cpu_shares(window: Window) -> dict[str, dict[str, float]]:
    """CPU of each role, as a part of the machine and of one core; ``others`` is everything that is no role."""
    cores = usable_cores()
    spent = {**window.cpu_s, "others": window.others_cpu_s}
    return {
        name: {
            "of_machine": round(share_of_machine(seconds, window.seconds, cores), 3),
            "of_one_core": round(share_of_machine(seconds, window.seconds, 1), 3),
        }
        for name, seconds in sorted(spent.items())
    }


def target_values(demo: dict[str, Any], streams: dict[str, Any]) -> dict[str, float]:
    """The measured value of each target."""
    memory = demo["memory_pss_mb"]
    return {
        "steps_per_second": demo["steps_per_second"],
        "completions_per_second": demo["completions_per_second"],
        "update_ms_p95": demo["update_ms"]["p95"],
        "token_gap_ms_p95_in_demo": demo["token_gap_ms"]["over_updates"]["p95"],
        "token_gap_ms_p95_of_streams": streams["token_gap_ms"]["over_updates"]["p95"],
        "coordinator_share_of_machine_cpu": demo["cpu"]["coordinator"]["of_machine"],
        "server_pss_mb": max(size for name, size in memory.items() if name.startswith("inference-")),
        "coordinator_pss_mb": memory["coordinator"],
    }


# --- async against sync -----------------------------------------------------------------------------------------------


def compare(order: tuple[int, ...], measure: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    """Run both sides in the given order and relate their speeds.

    Args:
        order: ``maxStaleness`` of each run.
        measure: ``(number of the run, maxStaleness) -> its figures``.
    """
    runs: dict[int, list[dict[str, Any]]] = {ASYNC: [], SYNC: []}
    for number, staleness in enumerate(order):
        runs[staleness].append(measure(number, staleness))
    speeds = {side: [run["steps_per_second"] for run in figures] for side, figures in runs.items()}
    return {"ratio": round(speed_ratio(speeds[ASYNC], speeds[SYNC]), 3), "async": runs[ASYNC], "sync": runs[SYNC]}


def measure_everything(plan: Plan, scratch: Path) -> dict[str, Any]:
    """All runs, one after the other.

    Raises:
        RunFailedError: one failed.
        StreamFailedError: a stream did.
    """
    demo, demo_speed = measure_demo(scratch, plan)

    def short(number: int, staleness: int) -> dict[str, Any]:
        if number == 0:
            return demo_speed
        return measure_speed(f"short-{number}-staleness-{staleness}", example_job(), scratch, staleness, plan.short_s)

    long_job = long_tailed_job(scratch)

    streams = measure_streams(scratch, long_job, plan.streams_s)

    def long(number: int, staleness: int) -> dict[str, Any]:
        return measure_speed(f"long-{number}-staleness-{staleness}", long_job, scratch, staleness, plan.long_s)

    return {
        "demo": demo,
        "streams": streams,
        "async_vs_sync": {
            "max_staleness": {"async": ASYNC, "sync": SYNC},
            "short_answers": compare(plan.short_order, short),
            "long_tailed_answers": compare(plan.long_order, long),
        },
        "targets": judge_targets(target_values(demo, streams)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter windows, no repetitions: about two minutes")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run that is under way
    facts = environment_facts()
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
            measured = measure_everything(QUICK if options.quick else FULL, Path(scratch))
    except (RunFailedError, StreamFailedError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    result = {
        "environment": facts,
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "steps_left_out": STEADY_AFTER,
        **measured,
    }
    tell(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
