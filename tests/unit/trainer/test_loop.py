"""The loop over a fake coordinator and a fake publisher, with a real tiny model."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight_runtime.config.roles import CheckpointConfig, LossConfig, OptimizerConfig, WeightSyncConfig
from inflight_runtime.coordinator.client import FencedError
from inflight_runtime.protocol import StepCommit
from inflight_runtime.trainer import loop, remote
from inflight_runtime.trainer.batching import BatchError
from inflight_runtime.trainer.loop import MAX_SKIPPED_STEPS, ConfigMismatchError, NonFiniteError, Trainer
from inflight_runtime.trainer.manifest import CheckpointError
from inflight_runtime.types import Attempt, Group, Version
from support.tiny_models import make_tiny_model
from support.trainer_fakes import (
    FakeCoordinator,
    FakePublisher,
    TrainerRun,
    random_batches,
    sampled_segment,
    trainer_config,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.export_weights()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_step_is_published_committed_and_logged(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model, rollouts_per_step=5), FakeCoordinator(random_batches(0)))
    run.run()
    assert [snapshot.version for snapshot in run.publisher.snapshots] == [Version(1, step) for step in range(5)]
    assert sorted(run.coordinator.commits) == [1, 2, 3, 4]
    assert run.publisher.closed
    metrics = lines(tmp_path / "logs/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert metrics[0] == run.coordinator.commits[1]
    assert metrics[0]["attempts"] == 8
    assert metrics[0]["reward/length"] > 0
    rollouts = lines(tmp_path / "logs/rollouts.jsonl")
    assert [line["step"] for line in rollouts] == [step for step in (1, 2, 3, 4) for _ in range(5)]
    assert rollouts[0]["text"] == "answer 2.0"
    assert rollouts[-1]["versions"] == ["1.3"]
    assert list((tmp_path / "logs/tensorboard").glob("events*"))


def test_published_weights_are_those_of_the_model(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(random_batches(0)))
    trainer = run.run()
    assert same(run.publisher.snapshots[-1].tensors(), weights(trainer))
    assert not same(run.publisher.snapshots[0].tensors(), weights(trainer))


def test_weights_are_published_in_the_servers_precision_whatever_the_trainer_computes_in(
    tmp_path: Path, model: Path
) -> None:
    config = trainer_config(tmp_path, model, steps=1, weight_sync=WeightSyncConfig(dtype="bfloat16"))
    run = TrainerRun(config, FakeCoordinator(random_batches(0), steps=1))
    trainer = run.run()
    rounded = {name: tensor.bfloat16() for name, tensor in weights(trainer).items()}
    assert same(run.publisher.snapshots[-1].tensors(), rounded)
    assert all(tensor.dtype == torch.bfloat16 for tensor in run.publisher.snapshots[-1].tensors().values())


def test_the_next_batch_is_asked_for_before_the_step_is_committed(tmp_path: Path, model: Path) -> None:
    seen: dict[int, set[int]] = {}
    groups = random_batches(0)

    def batches(step: int) -> list[Group]:
        seen[step] = set(coordinator.commits)
        return groups(step)

    coordinator = FakeCoordinator(batches)
    TrainerRun(trainer_config(tmp_path, model), coordinator).run()
    assert all(step - 1 not in done for step, done in seen.items())


def test_the_interval_thins_out_publications_but_not_the_last(tmp_path: Path, model: Path) -> None:
    config = trainer_config(tmp_path, model, steps=5)
    config = config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"interval_steps": 2})})
    run = TrainerRun(config, FakeCoordinator(random_batches(0), steps=5))
    run.run()
    assert [snapshot.version.step for snapshot in run.publisher.snapshots] == [0, 2, 4, 5]


def test_the_same_batches_give_the_same_bits(tmp_path: Path, model: Path) -> None:
    results = []
    for name in ("a", "b"):
        run = TrainerRun(trainer_config(tmp_path / name, model), FakeCoordinator(random_batches(7)))
        results.append((weights(run.run()), run.coordinator.commits[4]["loss"]))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_resuming_continues_bit_for_bit(tmp_path: Path, model: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=1)
    whole = TrainerRun(trainer_config(tmp_path / "a", model, optimizer=optimizer), FakeCoordinator(random_batches(3)))
    expected = weights(whole.run())

    config = trainer_config(
        tmp_path / "b",
        model,
        optimizer=optimizer,
        checkpoint=CheckpointConfig(dir=tmp_path / "b/checkpoints", every_steps=2),
    )
    first = TrainerRun(config, FakeCoordinator(random_batches(3), taken_over_at=3))
    with pytest.raises(FencedError):
        first.run()
    second = TrainerRun(config, FakeCoordinator(random_batches(3), epoch=1))
    resumed = second.run()
    assert second.coordinator.resumed_at == [2]
    assert [snapshot.version for snapshot in second.publisher.snapshots] == [Version(2, step) for step in (2, 3, 4)]
    assert same(weights(resumed), expected)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = trainer_config(tmp_path, model, checkpoint=CheckpointConfig(dir=tmp_path / "checkpoints", every_steps=1))
    TrainerRun(config, FakeCoordinator(random_batches(3))).run()
    state = tmp_path / "checkpoints/step-00000004/trainer.pt"
    state.write_bytes(state.read_bytes()[:-100])
    run = TrainerRun(config, FakeCoordinator(random_batches(3)))
    run.run()
    assert run.coordinator.resumed_at == [3]
    assert "step-00000004: trainer.pt has" in caplog.text


def test_another_runs_checkpoint_gives_weights_and_optimizer_and_starts_at_step_0(tmp_path: Path, model: Path) -> None:
    first = TrainerRun(trainer_config(tmp_path / "a", model), FakeCoordinator(random_batches(3)))
    trained = weights(first.run())
    settings = CheckpointConfig(dir=tmp_path / "b/checkpoints", resume_from=tmp_path / "a/checkpoints")
    second = TrainerRun(
        trainer_config(tmp_path / "b", model, job="other", checkpoint=settings), FakeCoordinator(random_batches(4))
    )
    trainer = second.run()
    assert second.coordinator.resumed_at == [0]
    assert same(second.publisher.snapshots[0].tensors(), trained)
    state = trainer.engine.optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    assert state[0]["step"] == 8  # Adam's own count goes on


def test_checkpoints_of_another_job_are_refused(tmp_path: Path, model: Path) -> None:
    TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(random_batches(3))).run()
    with pytest.raises(CheckpointError, match="job 'test', this is 'other'"):
        TrainerRun(trainer_config(tmp_path, model, job="other"), FakeCoordinator(random_batches(3))).run()


def test_resume_never_refuses_a_directory_with_checkpoints(tmp_path: Path, model: Path) -> None:
    TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(random_batches(3))).run()
    settings = CheckpointConfig(dir=tmp_path / "checkpoints", resume="never")
    with pytest.raises(CheckpointError, match="'never'"):
        TrainerRun(trainer_config(tmp_path, model, checkpoint=settings), FakeCoordinator(random_batches(3))).run()


def test_the_last_checkpoint_is_on_disk_before_the_run_is_reported_done(tmp_path: Path, model: Path) -> None:
    coordinator = FakeCoordinator(random_batches(0))
    present: list[bool] = []
    original = coordinator.commit

    async def commit(step: int, request: object) -> None:
        if step == 4:
            present.append((tmp_path / "checkpoints/step-00000004/runtime.json").exists())
        await original(step, request)  # type: ignore[arg-type]

    coordinator.commit = commit  # type: ignore[method-assign]
    TrainerRun(trainer_config(tmp_path, model), coordinator).run()
    assert present == [True]
    assert coordinator.events[-2:] == ["commit 4", "durable 4"]


def test_the_checkpoint_loads_in_plain_transformers(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(random_batches(0)))
    expected = weights(run.run())
    directory = tmp_path / "checkpoints/step-00000004/model"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert same({name: value.detach() for name, value in loaded.named_parameters()}, expected)
    text = [{"role": "user", "content": "hé\n"}]
    before, after = (AutoTokenizer.from_pretrained(path).apply_chat_template(text) for path in (model, directory))
    assert before["input_ids"] == after["input_ids"]


def test_durable_names_the_oldest_checkpoint_that_is_kept(tmp_path: Path, model: Path) -> None:
    settings = CheckpointConfig(dir=tmp_path / "checkpoints", every_steps=1, keep=2)
    coordinator = FakeCoordinator(random_batches(0))
    TrainerRun(trainer_config(tmp_path, model, checkpoint=settings), coordinator).run()
    assert [(entry.step, entry.oldest_step) for entry in coordinator.durable] == [(1, 1), (2, 1), (3, 2), (4, 3)]
    assert all(
        coordinator.events.index(f"commit {step}") < coordinator.events.index(f"durable {step}") for step in (1, 2, 3)
    )


def test_a_signal_while_waiting_ends_with_a_checkpoint(tmp_path: Path, model: Path) -> None:
    groups = random_batches(0)

    def batches(step: int) -> list[Group] | None:
        if step == 3:
            run.stop.signum = 15
            return None
        return groups(step)

    run = TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(batches))
    trainer = run.run()
    assert trainer.step == 2
    assert run.stop.exit_code == 143
    assert (tmp_path / "checkpoints/LATEST").read_text() == "step-00000002\n"
    assert run.coordinator.durable[-1].step == 2
    assert sorted(run.coordinator.commits) == [1, 2]


def test_a_signal_while_the_coordinator_is_gone_ends_with_a_checkpoint_of_every_step(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "LEAVE_S", 0.2)
    monkeypatch.setattr(loop, "FAREWELL_S", 0.2)
    coordinator = FakeCoordinator(random_batches(0))

    async def commit(step: int, request: StepCommit) -> None:
        if step == 2:
            run.stop.signum = 15
            await asyncio.Event().wait()
        coordinator.commits[step] = request.metrics

    coordinator.commit = commit  # type: ignore[method-assign]
    run = TrainerRun(trainer_config(tmp_path, model, steps=9), coordinator)
    coordinator.steps = 9
    trainer = run.run()
    assert trainer.step in (2, 3), "the signal may come when step 3 has begun"
    assert (tmp_path / "checkpoints/LATEST").read_text() == f"step-{trainer.step:08d}\n"
    assert list(coordinator.commits) == [1]
    assert "the coordinator does not know of the last checkpoint: no answer" in caplog.text


def test_a_signal_before_the_first_step_leaves_no_checkpoint(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(lambda step: None))
    run.stop.signum = 15
    assert run.run().step == 0
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert run.coordinator.durable == []


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = CheckpointConfig(dir=tmp_path / "checkpoints", every_steps=1)
    real = torch.save

    def save(state: dict, path: Path) -> None:
        if state["step"] == 2:
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(torch, "save", save)
    run = TrainerRun(trainer_config(tmp_path, model, checkpoint=settings), FakeCoordinator(random_batches(0)))
    run.run()
    assert [entry.step for entry in run.coordinator.durable] == [1, 3, 4]
    assert "No space left on device (" in caplog.text
    assert "The one of step 1 is untouched." in caplog.text
    assert sorted(run.coordinator.commits) == [1, 2, 3, 4]


def test_steps_without_a_finite_gradient_change_nothing_and_end_the_run(tmp_path: Path, model: Path) -> None:
    groups = random_batches(0)

    def batches(step: int) -> list[Group]:
        # Finite rewards whose gradient norm is beyond float32.
        return [
            replace(group, attempts=(replace(group.attempts[0], reward=3e38), *group.attempts[1:]))
            for group in groups(step)
        ]

    loss = LossConfig(normalization="token_mean")
    run = TrainerRun(trainer_config(tmp_path, model, steps=9, loss=loss), FakeCoordinator(batches, steps=9))
    with pytest.raises(NonFiniteError, match="5 steps in a row"):
        run.run()
    first, last = run.publisher.snapshots[0], run.publisher.snapshots[-1]
    assert last.version.step == MAX_SKIPPED_STEPS
    assert first.digest == last.digest
    assert run.coordinator.failures[0].source == "trainer"
    samples = lines(tmp_path / f"logs/not-finite-step-{MAX_SKIPPED_STEPS}.jsonl")
    assert len(samples) == 8
    assert samples[0]["segments"][0]["ids"]
    metrics = lines(tmp_path / "logs/metrics.jsonl")
    assert [line["skipped"] for line in metrics] == [1.0] * MAX_SKIPPED_STEPS
    assert metrics[0]["grad_norm"] is None, "JSON has no infinity"


def test_a_coordinator_of_another_job_file_is_refused(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model), FakeCoordinator(random_batches(0), steps=5))
    with pytest.raises(ConfigMismatchError, match="the coordinator runs 5 steps and the trainer 4"):
        run.run()


def test_a_batch_of_another_shape_is_refused(tmp_path: Path, model: Path) -> None:
    run = TrainerRun(trainer_config(tmp_path, model, group_size=3), FakeCoordinator(random_batches(0)))
    with pytest.raises(BatchError, match="4 attempts, group_size is 3"):
        run.run()


class SamplingCoordinator(FakeCoordinator):
    """Samples each batch one version behind; the reward is the share of tokens below 100."""

    def __init__(self, model: Path, publisher: FakePublisher, steps: int) -> None:
        super().__init__(self.sample, steps=steps)
        self.publisher = publisher
        self.policy = AutoModelForCausalLM.from_pretrained(model).eval()
        self.generator = torch.Generator().manual_seed(0)

    def sample(self, step: int) -> list[Group] | None:
        newest = self.publisher.snapshots[max(0, step - 2)]
        self.policy.load_state_dict(newest.tensors(), strict=False)
        version = (newest.version.epoch, newest.version.step)
        groups = []
        for index in range(2):
            prompt = torch.arange(5 * index, 5 * index + 5)
            rows, logprobs = prompt.repeat(4, 1), []
            for _ in range(6):
                with torch.no_grad():
                    step_logprobs = self.policy(rows).logits[:, -1].log_softmax(-1)
                tokens = torch.multinomial(step_logprobs.exp(), 1, generator=self.generator)
                rows = torch.cat([rows, tokens], 1)
                logprobs.append(step_logprobs.gather(1, tokens)[:, 0])
            answers, scores = rows[:, 5:].tolist(), torch.stack(logprobs, 1).tolist()
            attempts = [
                Attempt((sampled_segment(ids, values, version=version),), reward=sum(token < 100 for token in ids) / 6)
                for ids, values in zip(answers, scores, strict=True)
            ]
            groups.append(Group(2 * step + index, 1, index, prompt.numpy().astype(np.int32), tuple(attempts)))
        return groups


def test_a_trivial_task_is_learnt_one_step_off_policy(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1, initializer_range=0.1)
    publisher = FakePublisher()
    steps = 40
    config = trainer_config(
        tmp_path, model, steps=steps, optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)
    )
    coordinator = SamplingCoordinator(model, publisher, steps)
    TrainerRun(config, coordinator, publisher).run()
    rewards = [coordinator.commits[step]["reward_mean"] for step in range(1, steps + 1)]
    assert np.mean(rewards[:5]) < 0.6
    assert np.mean(rewards[-10:]) > 0.9
    assert [coordinator.commits[step]["staleness_mean"] for step in (1, 2, 3, steps)] == [0.0, 1.0, 1.0, 1.0]
    assert coordinator.commits[1]["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert coordinator.commits[1]["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert coordinator.commits[3]["mismatch_kl"] > 1e-5
    assert all(math.isfinite(value) for value in coordinator.commits[steps].values())
