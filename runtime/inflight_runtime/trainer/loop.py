"""The training loop, top to bottom.

For each step: take the batch, work out advantages and weights, run forward and backward over micro-batches, step the
optimizer, hand the new weights to the publisher (which is never waited for), commit the step, write the logs, write a
checkpoint when one is due.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.coordinator.client import CoordinatorUnavailableError
from inflight_runtime.garbage import spare_loaded_objects
from inflight_runtime.trainer.batching import StepData, build_step, check_batch
from inflight_runtime.trainer.checkpoint import CheckpointStore, start_checkpoint
from inflight_runtime.trainer.contract import EngineInfo, StepStats, TrainerEngine
from inflight_runtime.trainer.logfiles import json_line
from inflight_runtime.trainer.losses import LossSums
from inflight_runtime.trainer.manifest import Checkpoint, CheckpointError
from inflight_runtime.trainer.metrics import RunLog, Stopwatch, batch_metrics, rollout_lines
from inflight_runtime.trainer.packing import MicroBatch, attention_cost, plan_ranks
from inflight_runtime.trainer.ranks import LeadingEngine, Team, forward_backward
from inflight_runtime.trainer.remote import CALL_DEADLINE_S, Remote, WeightPublisher
from inflight_runtime.trainer.signals import StopRequest
from inflight_runtime.types import Version
from inflight_runtime.weights.snapshot import SnapshotBuffers

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS: Final = 5
"""Steps in a row without a finite gradient, after which the run fails."""
FAREWELL_S: Final = 15.0
"""For telling the coordinator of the last checkpoint after a signal: the checkpoint counts without that, too."""
PROGRESS_S: Final = 5.0
"""Between two lines of progress in the log."""

PublisherFactory = Callable[[int, Callable[[dict[str, object]], None]], WeightPublisher]
"""``(epoch, log) -> publisher``; ``log`` gets one entry for each update of a server that ended."""


class NonFiniteError(RuntimeError):
    """Loss or gradient were not finite for :data:`MAX_SKIPPED_STEPS` steps in a row."""


class ConfigMismatchError(RuntimeError):
    """Trainer and coordinator disagree on the run."""


class Trainer:
    """One training run, from the newest checkpoint (or the model) to the last step or a signal."""

    info: EngineInfo
    log: RunLog

    def __init__(
        self,
        config: TrainerConfig,
        engine: TrainerEngine,
        remote: Remote,
        make_publisher: PublisherFactory,
        stop: StopRequest,
        *,
        team: Team | None = None,
    ) -> None:
        self.config = config
        self.team = team or Team()
        self.engine = engine if self.team.size == 1 else LeadingEngine(engine, self.team)
        self.remote = remote
        self.stop = stop
        self.step = 0
        """Optimizer steps of this run done so far."""
        self.checkpoints = CheckpointStore(config.checkpoint.dir, config.job, config.checkpoint.keep)
        self._make_publisher = make_publisher
        self._snapshots = SnapshotBuffers()
        self._saved: Checkpoint | None = None
        self._skipped = 0
        self._metrics: dict[str, float] | None = None
        self._log_seconds = 0.0
        self._progress_due = 0.0

    def run(self) -> None:
        """Train to the last step, or until a signal.

        Raises:
            EngineError, CheckpointError, ConfigMismatchError: the run cannot begin (or its last checkpoint fails).
            FencedError, StaleEpochError: another trainer has taken over.
            NonFiniteError, NoBatchError, BatchError: the run cannot go on.
            CoordinatorError, CoordinatorUnavailableError: the coordinator refuses or is gone.
        """
        self.load()
        try:
            self.publish()
            first = self.step + 1
            for step in range(first, self.config.steps + 1):
                if not self.train_step(step):
                    break
                if step == first:  # torch loads much of itself in the first one
                    spare_loaded_objects()
            self.finish()
        finally:
            self.log.close(self._metrics)
            self.remote.close()
            self.engine.close()

    def load(self) -> None:
        """Load the newest whole checkpoint, the one to start from, or the model; then begin an epoch."""
        settings = self.config.checkpoint
        own = self._own_checkpoint()
        source = own.path if own else None
        if own is None and settings.resume_from is not None:
            source = start_checkpoint(settings.resume_from)
        self.step = own.step if own else 0
        began = time.monotonic()
        self.info = self.engine.init(self.config, source, self.step)
        logger.info(
            "loaded %s: %.1f million parameters in %.1f s",
            source or self.config.model.path,
            self.info.parameters / 1e6,
            time.monotonic() - began,
        )
        started = self.remote.start(self.step)
        if started.steps != self.config.steps:
            raise ConfigMismatchError(
                f"the coordinator runs {started.steps} steps and the trainer {self.config.steps}: "
                "both must be rendered from the same job"
            )
        logger.info("epoch %d begins at step %d of %d", started.epoch, self.step, started.steps)
        self.checkpoints.claim(started.epoch)
        self._saved = own
        self.report_saved()  # once more: the trainer may have died between the rename and the report
        self.log = RunLog(
            self.config.log_dir, first_step=self.step + 1, rollouts_per_step=self.config.rollouts_per_step
        )
        self.remote.set_publisher(lambda: self._make_publisher(started.epoch, self.log.update))

    def train_step(self, step: int) -> bool:
        """Do step ``step``; false when a signal came before its batch did."""
        watch = Stopwatch()
        batch = self.remote.wait_for_batch(step, self._stopping)
        if batch is None:
            return False
        if step < self.config.steps:
            self.remote.prefetch(step + 1)
        watch.lap("wait_seconds")

        check_batch(batch, step, self.config, self.info.vocab_size)
        data = build_step(batch, self.config)
        cost = attention_cost(self.info.hidden_size)
        plan = plan_ranks(data.sequences, self.config.micro_batch_tokens, cost, self.team.size)
        micro_batches = [batch for part in plan for batch in part]
        watch.lap("prepare_seconds")
        sums = self.forward_backward(plan)
        watch.lap("forward_backward_seconds")
        finite = math.isfinite(sums.loss)
        stats = self.engine.optimizer_step(skip=not (micro_batches and finite))
        self.step = step
        watch.lap("optimizer_seconds")
        if step % self.config.weight_sync.interval_steps == 0 or step == self.config.steps:
            self.publish()
        watch.lap("export_seconds")

        metrics = self._step_metrics(data, micro_batches, sums, stats, watch)
        if step == self.config.steps:
            self.save()  # before the commit that ends the run
        # JSON has no NaN: a step that went wrong is reported by what can be told of it.
        finite_metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.remote.commit(step, finite_metrics, self._stopping)
        self.log.step(data, metrics)
        self._metrics = metrics
        self._check_finite(data, finite and (stats.applied or not micro_batches))
        self._show_progress(metrics)
        watch.lap("log_seconds")
        self._log_seconds = watch.seconds["log_seconds"]
        every = self.config.checkpoint.every_steps
        if every and step % every == 0 and step < self.config.steps and not self.stop.requested:
            self._save_or_go_on()
        return True

    def forward_backward(self, plan: list[list[MicroBatch]]) -> LossSums:
        """Add up the gradients of a step over the ranks' micro-batches; returns its sums over tokens."""
        total = forward_backward(self.engine, self.team.hand_out(plan), self.config.loss)
        return LossSums() if total is None else LossSums.of(self.team.sum(total))

    def publish(self) -> None:
        """Copy the weights and hand them to the publisher; sending goes on beside."""
        version = Version(self.remote.epoch, self.step)
        snapshot = self._snapshots.capture(version, self.engine.export_weights(), self.config.weight_sync.dtype)
        self.remote.publish(snapshot)

    def save(self) -> None:
        """Write a checkpoint of the current step unless there is one, or nothing to save.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.step == (self._saved.step if self._saved else 0):
            return
        began = time.monotonic()
        self._saved = self.checkpoints.save(self.step, self.engine.save, Path(self.config.model.tokenizer))
        logger.info("checkpoint of step %d in %.1f s: %s", self.step, time.monotonic() - began, self._saved.path)

    def report_saved(self, timeout_s: float = CALL_DEADLINE_S) -> None:
        """Tell the coordinator of the newest checkpoint, after the commits up to it have arrived."""
        if self._saved is not None:
            self.remote.settle(timeout_s)
            oldest = min(self.checkpoints.whole_steps(), default=self._saved.step)
            self.remote.durable(self._saved.step, oldest, str(self._saved.path), timeout_s)

    def finish(self) -> None:
        """The last checkpoint; after the last step, wait until the servers have its weights."""
        self.save()
        if self.step < self.config.steps:
            try:
                self.report_saved(FAREWELL_S)
            except (TimeoutError, CoordinatorUnavailableError) as error:
                logger.warning("the coordinator does not know of the last checkpoint: %s", str(error) or "no answer")
            return
        self.report_saved()
        self.remote.wait_for_servers(Version(self.remote.epoch, self.step), self.config.weight_sync.deadline_s)
        logger.info("all %d steps are done", self.config.steps)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _stopping(self) -> bool:
        return self.team.stopping(self.stop)

    def _own_checkpoint(self) -> Checkpoint | None:
        settings = self.config.checkpoint
        if settings.resume == "auto":
            return self.checkpoints.newest_whole()
        if steps := self.checkpoints.steps():
            raise CheckpointError(
                f"checkpoint.resume is 'never' and {settings.dir} has checkpoints up to step {steps[-1]}: choose an "
                "empty directory, or resume from them with 'auto'"
            )
        return None

    def _step_metrics(
        self, data: StepData, micro_batches: list[MicroBatch], sums: LossSums, stats: StepStats, watch: Stopwatch
    ) -> dict[str, float]:
        before = batch_metrics(data)
        seconds = sum(watch.seconds.values()) + self._log_seconds
        return {
            "step": data.step,
            "epoch": self.remote.epoch,
            **before,
            **sums.metrics(),
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "skipped": float(not stats.applied),
            "micro_batches": len(micro_batches),
            "tokens_computed": sum(batch.tokens_computed for batch in micro_batches),
            **watch.seconds,
            "log_seconds": self._log_seconds,  # of the step before: this one's are still to come
            "step_seconds": seconds,
            "samples_per_second": before["attempts"] / seconds,
            "tokens_per_second": before["tokens_sampled"] / seconds,
            "time": time.time(),
        }

    def _check_finite(self, data: StepData, finite: bool) -> None:
        if finite:
            self._skipped = 0
            return
        self._skipped += 1
        logger.warning("step %d: loss or gradient is not finite; the optimizer step is skipped", data.step)
        if self._skipped < MAX_SKIPPED_STEPS:
            return
        path = self.config.log_dir / f"not-finite-step-{data.step}.jsonl"
        try:
            write_samples(path, data)
            where = f"its samples are in {path}"
        except OSError as error:  # the reason must not be lost with them
            where = f"its samples could not be written: {error}"
        reason = (
            f"loss or gradient was not finite in {self._skipped} steps in a row, up to step {data.step}; {where}. "
            "Lower the learning rate, or look at their rewards and logprobs"
        )
        self.remote.fail(reason)
        raise NonFiniteError(reason)

    def _save_or_go_on(self) -> None:
        """A checkpoint that cannot be written costs a line in the log, not the run: the one before is still whole."""
        try:
            self.save()
        except CheckpointError as error:
            logger.error("%s Training goes on.", error)
            return
        self.report_saved()

    def _show_progress(self, metrics: dict[str, float]) -> None:
        if time.monotonic() < self._progress_due and metrics["step"] < self.config.steps:
            return
        self._progress_due = time.monotonic() + PROGRESS_S
        logger.info(
            "step %d/%d: reward %.3f, loss %.4g, grad norm %.3g, staleness %.2f, "
            "%.2f s (%.2f s waiting), %.0f tokens/s",
            metrics["step"],
            self.config.steps,
            metrics["reward_mean"],
            metrics["loss"],
            metrics["grad_norm"],
            metrics["staleness_mean"],
            metrics["step_seconds"],
            metrics["wait_seconds"],
            metrics["tokens_per_second"],
        )


def write_samples(path: Path, data: StepData) -> None:
    """Write every attempt of a step with its token ids and logprobs, one JSON object a line."""
    attempts = {(group.group_id, number): a for group in data.groups for number, a in enumerate(group.attempts)}
    with path.open("w", encoding="utf-8") as file:
        for line in rollout_lines(data, len(attempts)):
            segments = attempts[line["group"], line["attempt"]].segments
            line["segments"] = [
                {"ids": s.ids.tolist(), "logprobs": s.logprobs.tolist(), "spans": s.spans} for s in segments
            ]
            file.write(json_line(line))
