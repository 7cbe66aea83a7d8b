"""Engines of several ranks against the single one: the same losses, gradients, weights and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inflight_runtime.config.roles import Dtype, OptimizerConfig, TrainerConfig
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.ranks import Team
from support.engine_worker import Task, run_task, write_plan
from support.forked_ranks import ForkedRanks, Launch
from support.tiny_models import Arch, make_tiny_model
from support.trainer_fakes import trainer_config
from support.trainer_side import hf_logits, load_exported, load_hf

DEADLINE_S = 240.0
EXACT = 1e-5
ADAMW = 2e-4
"""AdamW divides by the root of a small number, so rounding grows."""
LOGITS = 1e-3
"""Of models that differ by rounding; two tensors that are mixed up change them by whole units."""
RECOMPUTE = {"activation_checkpointing": True}
OFFLOAD = {"offload_optimizer": True}
pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("engine", ["fsdp2"])]


@dataclass
class Bench:
    """A tiny model, and runs of engines on it."""

    directory: Path
    model: Path
    config: TrainerConfig
    forked: ForkedRanks

    def task(
        self, name: str, *, dtype: Dtype = "float32", options: dict[str, Any] | None = None, **fields: Any
    ) -> Task:
        model = self.config.model.model_copy(update={"dtype": dtype})
        config = self.config.model_copy(update={"model": model} | (options or {}))
        return Task(name, config.model_dump_json(), **fields)

    def single(self, *tasks: Task) -> None:
        """Run in this process."""
        for task in tasks:
            engine = make_engine("single")
            run_task(task, engine, Team(), self.directory)
            engine.close()

    def ranks(self, engine: str, ranks: int, *tasks: Task) -> None:
        """Run on this many ranks."""
        code, output = self._run(engine, ranks, *tasks)
        assert code == 0, output

    def fail(self, engine: str, task: Task) -> str:
        """Run on 2 ranks what must not succeed; returns what was printed."""
        code, output = self._run(engine, 2, task)
        assert code == 1, output
        return output

    def _run(self, engine: str, ranks: int, *tasks: Task) -> tuple[int, str]:
        plan, log = self.directory / "plan.json", self.directory / "ranks.log"
        write_plan(plan, engine, list(tasks))
        log.unlink(missing_ok=True)
        return self.forked.run(Launch("support.engine_worker", [str(plan)], ranks, str(log), DEADLINE_S))

    def record(self, name: str) -> dict[str, list[float]]:
        return json.loads((self.directory / f"{name}.json").read_text())

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.directory / f"{name}.safetensors")

    def agree(self, one: str, other: str, tolerance: float) -> None:
        """Losses and gradient norms of two runs, and the norms of their tensors."""
        first, second = self.record(one), self.record(other)
        assert first["tokens"] == second["tokens"]
        for what in ("loss", "grad_norm"):
            assert second[what] == pytest.approx(first[what], rel=EXACT, abs=EXACT)
        mine, theirs = self.weights(one), self.weights(other)
        assert sorted(mine) == sorted(theirs)
        for name, tensor in mine.items():
            assert float(theirs[name].norm()) == pytest.approx(float(tensor.norm()), rel=tolerance, abs=tolerance), name


@pytest.fixture
def bench(forked: ForkedRanks, tmp_path: Path) -> Callable[[Arch], Bench]:
    """Makes a model of this architecture, and the bench for it."""

    def make(arch: Arch) -> Bench:
        model = make_tiny_model(tmp_path / "model", arch, tied=arch == "qwen2", initializer_range=0.1)
        config = trainer_config(
            tmp_path,
            model,
            groups_per_step=3,
            max_staleness=10,
            max_tokens=30,
            micro_batch_tokens=128,
            optimizer=OptimizerConfig(learning_rate=1e-3, grad_clip_norm=1.0),
        )
        return Bench(tmp_path, model, config, forked)

    return make


@pytest.mark.parametrize("arch", ["qwen2", "llama", "qwen3_moe"])
def test_two_ranks_train_as_one(engine: str, arch: Arch, tmp_path: Path, bench: Callable[[Arch], Bench]) -> None:
    here = bench(arch)
    here.single(here.task("single-sgd", sgd=True), here.task("single-adamw"))
    saved = tmp_path / "saved"
    here.ranks(
        engine,
        2,
        here.task("sgd", sgd=True),
        here.task("adamw", save=str(saved)),
        here.task("recompute", options=RECOMPUTE),
        here.task("offload", options=OFFLOAD),
        here.task("half", dtype="bfloat16"),
        here.task("half-lean", dtype="bfloat16", options=RECOMPUTE | OFFLOAD),
    )
    assert any(count % 2 for count in here.record("sgd")["micro_batches"]), "no rank was short of a micro-batch"
    assert min(here.record("sgd")["grad_norm"]) > 1.0, "nothing was clipped"
    here.agree("single-sgd", "sgd", EXACT)
    here.agree("single-adamw", "adamw", ADAMW)
    for plain, other in (("adamw", "recompute"), ("adamw", "offload"), ("half", "half-lean")):
        here.agree(plain, other, EXACT)
    rounded, exact = here.record("half")["loss"], here.record("adamw")["loss"]
    assert rounded != pytest.approx(exact, rel=EXACT)
    assert rounded == pytest.approx(exact, rel=0.1, abs=0.1)

    exported = here.weights("adamw")
    assert ("lm_head.weight" in exported) is (arch != "qwen2")
    logits = {
        name: hf_logits(load_exported(here.weights(name), here.model, tmp_path / f"plain-{name}"))
        for name in ("single-sgd", "sgd", "adamw")
    }
    assert (logits["sgd"] - logits["single-sgd"]).abs().max() < LOGITS
    assert torch.equal(hf_logits(load_hf(saved / "model")), logits["adamw"])


def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    engine: str, tmp_path: Path, bench: Callable[[Arch], Bench]
) -> None:
    here = bench("qwen2")
    two, one = tmp_path / "two", tmp_path / "one"
    here.single(here.task("whole", last=7))
    # Activation checkpointing and offloading may come and go at a resume, too.
    here.ranks(engine, 2, here.task("begin", last=3, save=str(two), options=RECOMPUTE))
    later = {"first": 4, "last": 7, "resume": str(two)}
    here.ranks(
        engine,
        1,
        here.task("on-one", **later),
        here.task("middle", **later | {"last": 5}, save=str(one), options=OFFLOAD),
    )
    here.ranks(engine, 2, here.task("on-two", **later), here.task("back-on-two", first=6, last=7, resume=str(one)))
    whole = here.record("whole")
    for name, first in (("on-one", 4), ("on-two", 4), ("back-on-two", 6)):
        for what in ("loss", "grad_norm"):
            assert here.record(name)[what] == pytest.approx(whole[what][first - 1 :], rel=ADAMW, abs=ADAMW), name
        for tensor_name, tensor in here.weights("whole").items():
            norm = float(here.weights(name)[tensor_name].norm())
            assert norm == pytest.approx(float(tensor.norm()), rel=ADAMW, abs=ADAMW), (name, tensor_name)


def test_the_weights_of_another_engine_are_taken_without_its_optimizer(
    engine: str, tmp_path: Path, bench: Callable[[Arch], Bench]
) -> None:
    here = bench("llama")
    saved = tmp_path / "saved"
    here.single(here.task("begin", last=2, save=str(saved)), here.task("whole", last=3))
    here.ranks(engine, 2, here.task("later", first=3, last=3, resume=str(saved)))
    assert here.record("later")["loss"] == pytest.approx(here.record("whole")["loss"][2:], rel=EXACT, abs=EXACT)


def test_a_model_that_rank_0_refuses_is_refused_by_all_ranks(
    engine: str, tmp_path: Path, bench: Callable[[Arch], Bench]
) -> None:
    here = bench("llama")
    whole = (here.model / "model.safetensors").read_bytes()
    settings = json.loads((here.model / "config.json").read_text())

    def refusals(name: str, **files: bytes) -> Task:
        """A task with a copy of the model that has other files."""
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_bytes(files.get("config", json.dumps(settings).encode()))
        (model / "model.safetensors").write_bytes(files.get("weights", whole))
        names = here.config.model.model_copy(update={"path": str(model)})
        return here.task(name, options={"model": names}, refused=True)

    tied = json.dumps(settings | {"tie_word_embeddings": True}).encode()
    here.ranks(
        engine,
        2,
        refusals("cut", weights=whole[: len(whole) // 2]),
        refusals("tied", config=tied),
        here.task("after", last=1),
    )
    first, second = ((tmp_path / f"cut.rank-{rank}.txt").read_text() for rank in range(2))
    assert first.startswith(f"model {tmp_path}/cut cannot be loaded: ")
    assert second == f"rank 0: {first}"
    for rank in range(2):
        found = (tmp_path / f"tied.rank-{rank}.txt").read_text()
        assert "rank 1 makes other weights of its config.json than rank 0 has loaded" in found


def test_what_cannot_be_loaded_or_written_is_said_on_every_rank(
    engine: str, tmp_path: Path, bench: Callable[[Arch], Bench]
) -> None:
    here = bench("qwen2")
    saved = tmp_path / "saved"
    here.ranks(engine, 2, here.task("begin", last=1, save=str(saved)))
    later = {"first": 2, "last": 2, "resume": str(saved)}

    blocked = tmp_path / "blocked"
    (blocked / "model").mkdir(parents=True)
    (blocked / "model" / "model.safetensors").mkdir()  # what only rank 0 writes
    output = here.fail(engine, here.task("blocked", **later, save=str(blocked)))
    assert "RankError: rank 0: " in output

    (part, *_) = sorted((saved / "optimizer").glob("*.distcp"))
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    assert f"EngineError: {saved}/optimizer cannot be loaded" in here.fail(engine, here.task("cut", **later))
    part.write_bytes(whole)

    state = torch.load(saved / "trainer.pt", weights_only=True)
    torch.save(state | {"parameters": state["parameters"][1:]}, saved / "trainer.pt")
    assert f"EngineError: {saved}/trainer.pt is not of this model" in here.fail(engine, here.task("other", **later))
