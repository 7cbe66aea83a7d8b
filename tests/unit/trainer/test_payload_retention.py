"""The trainer's checkpoints against a real ledger: whatever may still have to be replayed has its payloads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inflight_runtime.config.roles import CheckpointConfig, CoordinatorConfig
from inflight_runtime.coordinator.client import StepBatch
from inflight_runtime.coordinator.inspection import inspect
from inflight_runtime.protocol import CheckpointDurable, StepCommit, TrainerStart, TrainerStarted
from inflight_runtime.trainer.checkpoint import step_path
from inflight_runtime.types import Group, decode_group, encode_group
from support.coordinators import Desk, coordinator_config
from support.tiny_models import make_tiny_model
from support.trainer_fakes import FakeCoordinator, TrainerRun, random_group, trainer_config

STEPS = 7
GROUPS = 2


class LedgerCoordinator(FakeCoordinator):
    """Answers from a ledger on disk, whose payload files hold one group each; actors are always done at once."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__(lambda step: None, steps=config.steps)
        self.config = config
        self.members_of: dict[int, list[int]] = {}

    async def start_trainer(self, request: TrainerStart) -> TrainerStarted:
        self.desk = Desk.open(self.config, segment_bytes=1)
        self.desk.announce()
        self.resumed_at.append(request.resume_step)
        self.epoch = self.desk.start(request.resume_step)
        return TrainerStarted(epoch=self.epoch, steps=self.steps)

    async def batch(self, step: int, epoch: int, wait_seconds: float) -> StepBatch:
        plan = self.desk.batch(step, epoch)
        while plan is None:
            self._submit()
            plan = self.desk.batch(step, epoch)
        self.members_of[step] = plan.groups
        groups = [decode_group(self.desk.payloads.read(ref)) for ref in plan.refs]
        return StepBatch(step, step - 1, GROUPS, plan.excluded, groups)

    async def commit(self, step: int, request: StepCommit) -> None:
        self.desk.commit(step, request.epoch)
        self.commits[step] = request.metrics

    async def checkpoint(self, request: CheckpointDurable) -> None:
        self.desk.checkpoint(request.step, request.oldest_step, request.epoch)
        self.durable.append(request)

    def _submit(self) -> None:
        for lease in self.desk.lease(GROUPS).leases:
            made = random_group(np.random.default_rng(lease.group_id), lease.group_id)
            group = Group(lease.group_id, lease.fence, lease.problem_index, made.prompt_ids, made.attempts, "question")
            with self.desk.ledger.transaction():
                self.desk.ledger.rollouts.submit(inspect(encode_group(group)))


@pytest.mark.parametrize("damaged", [1, 2])
def test_what_is_replayed_after_damaged_checkpoints_is_all_there(tmp_path: Path, damaged: int) -> None:
    settings = coordinator_config(tmp_path, steps=STEPS, group_size=4, max_staleness=STEPS)
    config = trainer_config(
        tmp_path,
        make_tiny_model(tmp_path / "model", initializer_range=0.1),
        steps=STEPS,
        max_staleness=STEPS,
        checkpoint=CheckpointConfig(dir=tmp_path / "checkpoints", every_steps=1, keep=3),
    )
    coordinators = [LedgerCoordinator(settings) for _ in range(2)]
    first, second = (TrainerRun(config, coordinator) for coordinator in coordinators)
    original = coordinators[0].commit

    async def commit(step: int, request: StepCommit) -> None:
        await original(step, request)
        if step == STEPS - 2:  # step STEPS - 1 may have begun
            first.stop.signum = 15

    coordinators[0].commit = commit  # type: ignore[method-assign]
    stopped_at = first.run().step
    coordinators[0].desk.close()
    payloads = sorted((settings.data_dir / "payloads").glob("*.seg"))
    assert len(payloads) < GROUPS * stopped_at, "payloads that no checkpoint needs are gone"
    for step in range(stopped_at - damaged + 1, stopped_at + 1):
        (step_path(tmp_path / "checkpoints", step) / "trainer.pt").unlink()

    assert second.run().step == STEPS
    assert coordinators[1].resumed_at == [stopped_at - damaged]
    for step in range(stopped_at - damaged + 1, stopped_at + 1):
        assert coordinators[1].members_of[step] == coordinators[0].members_of[step]
        assert coordinators[1].commits[step]["loss"] == coordinators[0].commits[step]["loss"]
    coordinators[1].desk.close()
    assert coordinators[1].durable[0].oldest_step == stopped_at - 2, "the oldest that is kept, not the one resumed"
