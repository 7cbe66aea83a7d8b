"""Whole runs whose trainer has two ranks, on a live vLLM server that is updated in flight."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from inflight_runtime.coordinator.payloads import PayloadRef, SegmentStore
from inflight_runtime.types import Attempt, Group, Version, decode_group
from support.runs import LocalRun, check_ledger, local_run, sort_letters_job
from support.trainer_side import hf_logprobs, load_hf

STEPS, GROUPS, SAVED = 40, 16, 3
TOLERANCE = 1e-4
pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])]


def trained_groups(run: LocalRun) -> list[Group]:
    """What the coordinator has of every trained group, as the actors handed it in."""
    store = SegmentStore(run.directory / "coordinator" / "payloads")
    query = "SELECT segment, offset, length FROM groups WHERE state = 'trained' AND segment IS NOT NULL"
    with contextlib.closing(run.ledger()) as database:
        return [decode_group(store.read(PayloadRef(*row))) for row in database.execute(query)]


def sampled_by(groups: list[Group], version: Version) -> list[tuple[Group, Attempt]]:
    """The attempts that one version alone has sampled."""
    pairs = [(group, attempt) for group in groups for attempt in group.survivors]
    return [pair for pair in pairs if {span.version for span in pair[1].spans()} == {version}]


def test_two_ranks_train_against_a_live_server(engine: str, letters_model: Path, tmp_path: Path) -> None:
    job = sort_letters_job(letters_model, engine="vllm", steps=STEPS, promptsPerStep=GROUPS, groupSize=8)
    job["spec"]["trainer"] |= {"engine": engine, "processesPerNode": 2}
    job["spec"]["checkpoint"] = {"everySteps": SAVED, "keep": STEPS}
    job["spec"]["logging"] = {"rolloutsPerStep": 1000}
    with local_run(job, tmp_path) as run:
        run.succeed(400)
        check_ledger(run, steps=STEPS, groups_per_step=GROUPS)
        metrics = run.metrics()
        assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
        assert {record["epoch"] for record in metrics} == {1}

        updates = [json.loads(line) for line in (run.directory / "updates.jsonl").read_text().splitlines()]
        steps = [update["step"] for update in updates]
        assert all(update["ok"] for update in updates), updates
        assert steps == sorted(set(steps))
        assert steps[-1] == STEPS
        skipped = [later - earlier - 1 for earlier, later in pairwise(steps)]
        assert skipped == [update["skipped"] for update in updates[1:]]
        assert any(len(line["versions"]) > 1 for line in run.rollouts()), "no update came while an answer was generated"

        groups = trained_groups(run)
        saved = {step: sampled_by(groups, Version(1, step)) for step in range(SAVED, STEPS, SAVED)}
        alone = {step: attempts for step, attempts in saved.items() if attempts}
        assert len(alone) >= 3, f"too few of the saved versions sampled anything by themselves: {list(alone)}"
        for step in (min(alone), *sorted(alone)[-2:]):
            model = load_hf(run.directory / "checkpoints" / f"step-{step:08d}" / "model")
            for group, attempt in alone[step][:20]:
                (segment,) = attempt.segments
                expected = hf_logprobs(model, group.prompt_ids.tolist(), segment.ids.tolist())
                assert (torch.tensor(segment.logprobs) - expected).abs().max() < TOLERANCE, f"version 1.{step}"

        rewards = [record["reward_mean"] for record in metrics]
        assert sum(rewards[-10:]) > sum(rewards[:10]), rewards
