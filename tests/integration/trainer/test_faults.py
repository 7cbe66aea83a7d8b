"""What may go wrong with checkpoints and numbers, in the whole loop of every engine over a fake coordinator.

Engines of several ranks share one torchrun: starting it takes longer than most of what is tried here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from inflight_runtime.config.roles import CheckpointConfig, OptimizerConfig, TrainerConfig
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.loop import MAX_SKIPPED_STEPS
from support.loop_worker import CUTS, Mishap, Scenario
from support.tiny_models import make_tiny_model
from support.torchrun import run_to_end, torchrun
from support.trainer_fakes import trainer_config

DEADLINE_S = 300.0
DISK_MIB = 24
"""Of the disk that fills up: twice what the checkpoints of a run take."""
STEPS = 6
LAST = 10
"""Step of the last mishap with numbers."""
ENGINES = {
    "single": {"engine": "single"},
    "fsdp2": {"engine": "fsdp2"},
    "deepspeed-1": {"engine": "deepspeed", "zero_stage": 1},
    "deepspeed-2": {"engine": "deepspeed", "zero_stage": 2},
    "deepspeed-3": {"engine": "deepspeed", "zero_stage": 3},
}
SAVING = ("single", "fsdp2", "deepspeed-1", "deepspeed-3")
"""Stages 1 and 2 save alike."""
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a scenario left, rank 0 first."""

    ranks: list[dict[str, Any]]

    @property
    def lead(self) -> dict[str, Any]:
        return self.ranks[0]

    def said(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lead["log"])


@dataclass
class Lab:
    """Where scenarios are made; their directories go by name."""

    home: Path
    disk: Path
    models: dict[str, Path]

    def config(self, engine: str, directory: Path, *, model: str = "wide", **changes: Any) -> TrainerConfig:
        fields = {
            "steps": STEPS,
            "groups_per_step": 4,
            "micro_batch_tokens": 128,
            "max_staleness": 20,
            "optimizer": OptimizerConfig(learning_rate=1e-3),
            "checkpoint": CheckpointConfig(dir=directory / "checkpoints", every_steps=1, keep=2),
        }
        return trainer_config(directory, self.models[model], **(fields | ENGINES[engine] | changes))

    def scenario(self, name: str, engine: str, *mishaps: Mishap, on: Path | None = None, **fields: Any) -> Scenario:
        own = {key: fields.pop(key) for key in ("epoch", "cut", "graft") if key in fields}
        config = self.config(engine, on or self.home / f"{engine}-{name}", **fields)
        return Scenario(f"{engine}-{name}", config.model_dump_json(), mishaps=mishaps, **own)

    def scenarios(self, engine: str) -> list[Scenario]:
        """All that an engine goes through."""
        ranks = 1 if engine == "single" else 2
        other = ranks - 1
        numbers = [
            Mishap("nan gradient", 2, other),
            Mishap("nan loss", 4, other),
            *(Mishap("inf gradient", step, other) for step in range(LAST - MAX_SKIPPED_STEPS + 1, LAST + 1)),
        ]
        found = [
            self.scenario("numbers", engine, *numbers, steps=LAST + 2, checkpoint=self._seldom(f"{engine}-numbers"))
        ]
        if engine not in SAVING:
            return found
        disk = self.disk / engine
        full = [Mishap("full", 2, at="save", size=100_000), Mishap("full", 4, at="save", size=700_000)]
        # Under deepspeed rank 0 alone writes.
        full += [Mishap("no room", 5, 1 if engine == "fsdp2" else 0, "save", 200_000)]
        full += [Mishap("full", STEPS, at="save", size=50_000)]
        found += [
            self.scenario("full", engine, *full, on=disk),
            self.scenario("again", engine, on=disk, epoch=1),
            self.scenario("whole", engine),
            self.scenario("cut", engine, epoch=1, cut=len(engine), on=self.home / f"{engine}-whole"),
            self.scenario("in-save", engine, *(Mishap("signal", 2, rank, "save") for rank in range(ranks))),
            self.scenario(
                "in-forward",
                engine,
                Mishap("signal", 3, other),
                steps=200,
                checkpoint=self._seldom(f"{engine}-in-forward"),
            ),
            self.scenario("in-wait", engine, Mishap("signal", 3, other, "wait")),
            self.scenario("narrow", engine, model="narrow", steps=1),
        ]
        grafted = self.home / f"{engine}-grafted"
        parts = tuple(
            str(self.home / name / "checkpoints" / step)
            for name, step in ((f"{engine}-whole", f"step-{STEPS:08d}"), (f"{engine}-narrow", "step-00000001"))
        )
        settings = CheckpointConfig(dir=grafted / "new", resume_from=grafted / "checkpoints")
        found.append(self.scenario("grafted", engine, graft=parts, checkpoint=settings))
        if engine == "fsdp2":  # whose ranks all write
            found.append(self.scenario("apart", engine, Mishap("elsewhere", 1, 1, "save"), steps=2))
        return found

    def crossing(self, old: str, new: str) -> Scenario:
        """Engine ``new`` begins with a checkpoint of engine ``old``."""
        directory = self.home / f"from-{old}-{new}"
        settings = CheckpointConfig(dir=directory, resume_from=self.home / f"{old}-whole" / "checkpoints")
        return self.scenario(f"from-{old}", new, steps=1, checkpoint=settings)

    def _seldom(self, name: str) -> CheckpointConfig:
        return CheckpointConfig(dir=self.home / name / "checkpoints", every_steps=0)

    def run(self, ranks: int, scenarios: Sequence[Scenario]) -> dict[str, Outcome]:
        """Run scenarios, on a small disk of their own at ``disk``, that goes when they are done."""
        plan = self.home / "plan.json"
        plan.write_text(json.dumps([asdict(scenario) for scenario in scenarios]))
        # In a mount namespace of its own, without which a user would need rights to mount.
        namespace = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
        mount = f'mount -t tmpfs -o size={DISK_MIB}m none "$0" || exit 99; exec "$@"'
        launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
        code, output = run_to_end(
            [*namespace, "sh", "-c", mount, str(self.disk), *launcher, "-m", "support.loop_worker", str(plan)],
            DEADLINE_S,
        )
        assert code != 99 and "unshare:" not in output, (
            f"no small disk could be made, which this test needs: {output}\nAs root it takes the right to mount "
            "(CAP_SYS_ADMIN); else user namespaces must be allowed: "
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
        assert code == 0, output
        return {scenario.name: self._outcome(scenario.name, ranks) for scenario in scenarios}

    def _outcome(self, name: str, ranks: int) -> Outcome:
        names = [name, *(f"{name}.rank-{rank}" for rank in range(1, ranks))]
        return Outcome([json.loads((self.home / f"{entry}.json").read_text()) for entry in names])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    home = tmp_path_factory.mktemp("faults")
    (home / "disk").mkdir()
    models = {
        "wide": make_tiny_model(home / "wide", "llama", tied=False, initializer_range=0.1),
        "narrow": make_tiny_model(home / "narrow", "llama", tied=False, initializer_range=0.1, hidden=32),
    }
    return Lab(home, home / "disk", models)


@pytest.fixture(scope="module")
def outcomes(lab: Lab) -> dict[str, Outcome]:
    """Everything, in two launches."""
    several = [name for name in ENGINES if name != "single"]
    found = lab.run(1, lab.scenarios("single"))
    crossings = [lab.crossing(*pair) for pair in CROSSINGS if pair[1] != "single"]
    return found | lab.run(2, [*(s for name in several for s in lab.scenarios(name)), *crossings])


saving = pytest.mark.parametrize("engine", SAVING)


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_numbers_of_one_rank_are_skipped_by_all(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-numbers"]
    skipped = {2, 4, *range(LAST - MAX_SKIPPED_STEPS + 1, LAST + 1)}
    commits = {int(step): metrics for step, metrics in found.lead["commits"].items()}
    assert [step for step, metrics in commits.items() if metrics["skipped"]] == sorted(skipped)
    first, *others = (rank["exported"] for rank in found.ranks)
    assert all(other == first for other in others), "the ranks have different weights"
    assert [step for step in commits if first[step] == first[step - 1]] == sorted(skipped)
    assert len(found.lead["metrics"]) == LAST
    assert found.lead["metrics"][3]["loss"] is None
    assert "loss" not in commits[4], "JSON has no NaN"


@pytest.mark.parametrize("engine", ENGINES)
def test_too_many_of_them_in_a_row_end_the_run_with_their_samples(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-numbers"].lead
    assert found["step"] == LAST
    assert re.match(rf"NonFiniteError: .* {MAX_SKIPPED_STEPS} steps in a row, up to step {LAST}", found["error"])
    (sample,) = found["samples"]
    (reason,) = found["failures"]
    assert sample == f"not-finite-step-{LAST}.jsonl"
    assert f"/{sample}" in reason


@saving
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-full"]
    assert [step for step, _ in found.lead["durable"]] == [1, 3]
    for step, kept in ((2, 1), (4, 3), (5, 3)):
        why = "File too large" if step == 5 else "No space left on device"
        assert found.said(
            rf"ERROR checkpoint of step {step} could not be written .*{why}.* \(\d+\.\d MiB are free there\)\. "
            rf"The one of step {kept} is untouched\. .* Training goes on\."
        ), found.lead["log"]


@saving
def test_a_full_disk_at_the_last_step_ends_the_run_with_a_reason(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-full"].lead
    assert found["step"] == STEPS
    assert re.match(
        rf"CheckpointError: checkpoint of step {STEPS} could not be written .* step 3 is unt", found["error"]
    )
    assert str(STEPS) not in found["commits"], "a run is not done before its weights are safe"
    assert found["names"] == ["LATEST", "OWNER", "step-00000001", "step-00000003"], "nothing temporary is left"
    assert found["whole"] == [1, 3]


@saving
def test_when_there_is_room_again_the_run_ends_with_the_same_weights(outcomes: dict[str, Outcome], engine: str) -> None:
    found, before = outcomes[f"{engine}-again"].lead, outcomes[f"{engine}-full"].lead
    assert found["error"] is None
    assert found["resumed_at"] == [3]
    assert found["exported"] == before["exported"][3:]
    assert found["whole"] == [5, 6]


@saving
def test_a_checkpoint_cut_off_anywhere_is_passed_over_and_the_numbers_are_the_same(
    outcomes: dict[str, Outcome], engine: str
) -> None:
    found, whole = outcomes[f"{engine}-cut"].lead, outcomes[f"{engine}-whole"].lead
    assert len(found["cuts"]) >= CUTS
    assert all(passed for _, passed in found["cuts"]), found["cuts"]
    files = {name for name, _ in found["cuts"]}
    assert {"trainer.pt", "runtime.json", "model/model.safetensors", "model/config.json"} <= files
    if engine == "fsdp2":
        assert {"optimizer/.metadata", "optimizer/__0_0.distcp", "optimizer/__1_0.distcp"} <= files
    assert found["resumed_at"] == [STEPS - 1]
    assert found["exported"] == whole["exported"][STEPS - 1 :]
    assert found["commits"][str(STEPS)]["loss"] == whole["commits"][str(STEPS)]["loss"]
    assert found["durable"][0] == [STEPS - 1, STEPS - 1], "payloads from there on are still needed"


@saving
def test_signals_in_the_middle_of_a_save_leave_it_whole(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-in-save"]
    assert found.lead["error"] is None
    assert {rank["signal"] for rank in found.ranks} == {signal.SIGTERM}
    assert found.lead["step"] == 2
    assert found.lead["whole"] == [1, 2]
    assert found.lead["durable"][-1] == [2, 1]


@saving
def test_signals_in_the_middle_of_a_step_end_with_a_checkpoint_of_it(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-in-forward"]
    assert found.lead["error"] is None
    assert {rank["signal"] for rank in found.ranks} == {signal.SIGTERM}
    assert 3 <= found.lead["step"] < 200
    assert found.lead["whole"] == [found.lead["step"]]
    assert found.lead["durable"] == [[found.lead["step"]] * 2]


@saving
def test_signals_while_there_is_no_batch_end_with_a_checkpoint(outcomes: dict[str, Outcome], engine: str) -> None:
    found = outcomes[f"{engine}-in-wait"]
    assert found.lead["error"] is None
    assert {rank["signal"] for rank in found.ranks} == {signal.SIGTERM}
    assert (found.lead["step"], found.lead["whole"][-1], found.lead["durable"][-1]) == (2, 2, [2, 1])


def test_ranks_that_do_not_share_the_directory_are_noticed_before_it_is_too_late(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes["fsdp2-apart"]
    assert found.said(r"ERROR checkpoint of step 1 could not be written .*__1_0\.distcp of another rank did not arrive")
    assert found.lead["whole"] == [2]


@saving
def test_an_optimizer_of_another_model_is_refused_on_every_rank(outcomes: dict[str, Outcome], engine: str) -> None:
    for rank in outcomes[f"{engine}-grafted"].ranks:
        assert re.match("EngineError: .*(do|does) not belong to", rank["error"]), rank["error"]


CROSSINGS = [
    ("single", "fsdp2"),
    ("single", "deepspeed-3"),
    ("fsdp2", "single"),
    ("fsdp2", "deepspeed-1"),
    ("deepspeed-1", "single"),
    ("deepspeed-3", "fsdp2"),
]


@pytest.mark.parametrize(("old", "new"), CROSSINGS)
def test_the_log_says_whether_the_optimizer_goes_over_to_another_engine(
    outcomes: dict[str, Outcome], lab: Lab, old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    if new == "single":
        saved = outcomes[f"{old}-whole"] and lab.home / f"{old}-whole" / "checkpoints" / f"step-{STEPS:08d}"
        with caplog.at_level("INFO"):
            engine = make_engine(new)
            engine.init(lab.config(new, lab.home), saved, STEPS)
            engine.close()
        lines = caplog.messages
    else:
        lines = outcomes[f"{new}-from-{old}"].lead["log"]
    keeps = "fsdp2" not in (old, new)
    writer = "'fsdp2'" if old == "fsdp2" else "'single' or 'deepspeed'"
    expected = (
        f"the weights and the optimizer go on from step {STEPS}"
        if keeps
        else f"was written by the engine {writer}: the weights are taken over and the optimizer begins afresh"
    )
    assert sum(expected in line for line in lines) == 1, lines
