"""Measures the trainer's engines against ``single`` on this machine and prints one JSON object.

    python benchmarks/trainer_engines.py [--quick] [--only single fsdp2]

Every engine trains SmolLM2-135M (``examples/smollm2-arithmetic``) on the same steps, alone on the machine. The engines
take turns, in one order and then in the other, so that a machine that gets slower or faster meanwhile weighs on all
alike. What each figure means stands in ``docs/measurements.md``. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from figures import TooLittleDataError, share_of_machine, spread
from machine_facts import environment_facts, tell, usable_cores
from processes import busy_seconds
from step_data import Shape

BENCHMARKS = Path(__file__).resolve().parent
EXAMPLE = BENCHMARKS.parent / "examples" / "smollm2-arithmetic"
START_DEADLINE_S = 600.0
SAME = 1e-4
"""Relative difference of loss and gradient norm up to which two engines have done the same."""
PARTS = ("step", "forward", "backward", "optimizer")


class EngineFailedError(RuntimeError):
    """An engine could not be measured; the message says why, with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: an engine on some ranks.

    Attributes:
        name: in the result.
        ranks: processes; the cores are divided among them.
        config: of the trainer.
    """

    name: str
    ranks: int
    config: dict[str, Any] = field(default_factory=dict)


SIDES = (
    Side("single", 1, {"engine": "single"}),
    Side("fsdp2", 2, {"engine": "fsdp2"}),
    *(Side(f"deepspeed-{stage}", 2, {"engine": "deepspeed", "zero_stage": stage}) for stage in (1, 2, 3)),
    Side("fsdp2-one-rank", 1, {"engine": "fsdp2"}),
    Side("deepspeed-2-one-rank", 1, {"engine": "deepspeed", "zero_stage": 2}),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: ``steps`` after ``warm_up`` and ``exports`` in each of ``rounds`` starts of an engine."""

    rounds: int
    warm_up: int
    steps: int
    exports: int
    shape: Shape


SHAPE = Shape(groups=8, attempts=8, prompt=37, answers=(3, 8))
FULL = Plan(rounds=2, warm_up=1, steps=3, exports=2, shape=SHAPE)
QUICK = Plan(rounds=1, warm_up=1, steps=2, exports=1, shape=SHAPE)


def say(text: str) -> None:
    print(f"bench {time.strftime('%T')}: {text}", file=sys.stderr, flush=True)


def example_model() -> Path:
    """The example's model, made if it is not there yet.

    Raises:
        subprocess.CalledProcessError: it cannot be made.
    """
    if not (EXAMPLE / "model").is_dir():
        subprocess.run([sys.executable, str(EXAMPLE / "make_model.py")], check=True, stdout=sys.stderr)
    return EXAMPLE / "model"


# --- one start --------------------------------------------------------------------------------------------------------


def run_side(side: Side, plan: Plan, model: Path, scratch: Path) -> list[dict[str, Any]]:
    """Start an engine and let it train; what each rank measured, with the CPU that others took meanwhile.

    Raises:
        EngineFailedError: a rank failed.
    """
    directory = scratch / side.name
    directory.mkdir()
    threads = max(1, usable_cores() // side.ranks)
    request = directory / "plan.json"
    request.write_text(json.dumps(asdict(plan) | {"model": str(model), "config": {**side.config, "threads": threads}}))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(side.ranks)]
    log = directory / "log"
    began, busy, own = time.monotonic(), busy_seconds(), children_seconds()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(BENCHMARKS / "trainer_rank.py"), str(request)],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        try:
            code: int | None = process.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    passed = time.monotonic() - began
    others = max(0.0, busy_seconds() - busy - (children_seconds() - own))
    if code != 0:
        reason = f"exit code {code}" if code is not None else f"not done after {START_DEADLINE_S:g} s"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        raise EngineFailedError(f"{side.name} failed: {reason}\n{tail}")
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(side.ranks)]
    shutil.rmtree(directory)  # a checkpoint of 1.6 GB
    share = share_of_machine(others, passed, usable_cores())
    step = median(one["step"] for one in ranks[0]["steps"])
    say(f"{side.name}: {step:.2f} s a step, {passed:.0f} s in all (others took {share:.0%} of the CPU)")
    return [{**rank, "others_share_of_machine_cpu": share} for rank in ranks]


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a launch: torchrun ends its ranks, which have sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def children_seconds() -> float:
    """CPU time of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- figures ----------------------------------------------------------------------------------------------------------


def side_figures(side: Side, starts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """One engine's figures over all its starts.

    Args:
        side: the engine.
        starts: for each start what each rank measured. Times are rank 0's, which waits for the others.
    """
    leads = [ranks[0] for ranks in starts]
    steps = [step for lead in leads for step in lead["steps"]]
    cpu = [
        sum(step["cpu"] for step in same) for ranks in starts for same in zip(*(r["steps"] for r in ranks), strict=True)
    ]
    return {
        "ranks": side.ranks,
        "threads_per_rank": leads[0]["threads"],
        "load_s": round(median(lead["load"] for lead in leads), 2),
        **{f"{part}_s": spread([step[part] for step in steps], 3) for part in PARTS},
        "step_cpu_s": spread(cpu, 3),
        "export_s": spread([value for lead in leads for value in lead["export"]], 3),
        "save_s": spread([lead["save"] for lead in leads], 3),
        "peak_rss_mb": {
            phase: [max(ranks[rank]["peak_rss_mb"][phase] for ranks in starts) for rank in range(side.ranks)]
            for phase in leads[0]["peak_rss_mb"]
        },
        "others_share_of_machine_cpu": round(max(lead["others_share_of_machine_cpu"] for lead in leads), 3),
    }


def ratios(one: Mapping[str, Any], single: Mapping[str, Any]) -> dict[str, float]:
    """How many times what ``single`` needs: medians of seconds, CPU of all ranks, and the memory of the larger rank."""
    times = {
        f"{part}_s": one[f"{part}_s"]["p50"] / single[f"{part}_s"]["p50"]
        for part in (*PARTS, "step_cpu", "export", "save")
    }
    memory = {
        f"peak_rss_{phase}": max(sizes) / max(single["peak_rss_mb"][phase])
        for phase, sizes in one["peak_rss_mb"].items()
    }
    return {name: round(value, 3) for name, value in (times | memory).items()}


def check_same(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare the first step of two engines.

    Raises:
        EngineFailedError: loss or gradient norm differ, so their times say nothing.
    """
    for what in ("loss", "grad_norm"):
        if abs(one[what] - other[what]) > SAME * max(1.0, abs(other[what])):
            raise EngineFailedError(f"{name} has {what} {one[what]:.6g} in its first step, single {other[what]:.6g}")


def measure_sides(sides: Sequence[Side], plan: Plan, model: Path, scratch: Path) -> dict[str, Any]:
    """All engines, in turns.

    Raises:
        EngineFailedError: one failed, or did something else than ``single``.
    """
    starts: dict[str, list[list[dict[str, Any]]]] = {side.name: [] for side in sides}
    for number in range(plan.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            starts[side.name].append(run_side(side, plan, model, scratch))
    single = starts["single"][0][0]
    for name, ranks in starts.items():
        check_same(name, ranks[0][0], single)
    engines = {side.name: side_figures(side, starts[side.name]) for side in sides}
    return {
        "parameters": single["parameters"],
        "plan": asdict(plan),
        "engines": engines,
        "ratio_to_single": {
            name: ratios(figures, engines["single"]) for name, figures in engines.items() if name != "single"
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one start of each engine")
    parser.add_argument("--only", nargs="+", choices=[side.name for side in SIDES], help="these, and single")
    parser.add_argument("--model", type=Path, help="another model's directory")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the engine that is under way
    facts = environment_facts()
    began = time.monotonic()
    sides = [side for side in SIDES if options.only is None or side.name in ("single", *options.only)]
    try:
        model = options.model or example_model()
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
            measured = measure_sides(sides, QUICK if options.quick else FULL, model, Path(scratch))
    except (EngineFailedError, TooLittleDataError, subprocess.CalledProcessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    result = {"environment": facts, "quick": options.quick, "seconds": round(time.monotonic() - began, 1), **measured}
    tell(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
