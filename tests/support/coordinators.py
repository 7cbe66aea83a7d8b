"""Coordinators of the tests: small configs, ledgers without a server, groups to submit, and the real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight_runtime.config.roles import CoordinatorConfig
from inflight_runtime.coordinator.inspection import Submission, inspect
from inflight_runtime.coordinator.ledger import Ledger
from inflight_runtime.coordinator.payloads import SegmentStore
from inflight_runtime.coordinator.rollouts import Grant, Granted
from inflight_runtime.types import Attempt, Group, Span, encode_group, make_segment

TOKEN = "a-token-for-tests"  # not a secret
START_DEADLINE_S = 60.0
ACTOR = "actor-0"


def coordinator_config(directory: Path, *, port: int = 1, **changes: Any) -> CoordinatorConfig:
    """A config of a small run: 10 steps of 2 groups of 2 attempts, staleness 1."""
    token_file = directory / "token"
    token_file.write_text(TOKEN + "\n")
    values = {
        "job": "test",
        "port": port,
        "data_dir": directory / "coordinator",
        "token_file": token_file,
        "steps": 10,
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 1,
        "max_leased_groups": 64,
    }
    return CoordinatorConfig(**(values | changes))


def group_for(
    group_id: int,
    fence: int = 1,
    problem: int = 0,
    *,
    rewards: Sequence[float | None] = (0.0, 1.0),
    step: int = 0,
    epoch: int = 1,
    text: str = "answer",
) -> Group:
    """A group with one attempt per reward (``None``: it failed), all sampled at one version."""
    attempts = []
    for reward in rewards:
        if reward is None:
            attempts.append(Attempt(status="failed", error="no answer", finish="error"))
            continue
        span = Span(epoch, step, 0, 3, "inference-0", "boot")
        segment = make_segment([1, 2, 3, 4], [True, True, True, False], [-0.5, -0.25, -1.0, 0.0], [span])
        attempts.append(Attempt(segments=(segment,), reward=reward, text=text, parts={"exact": reward}))
    return Group(
        group_id, fence, problem, make_segment([7, 8], [True] * 2, [0.0] * 2, ()).ids, tuple(attempts), "prompt"
    )


def submission_for(lease: Granted, **changes: Any) -> Submission:
    """What an actor would submit for a lease."""
    return inspect(encode_group(group_for(lease.group_id, lease.fence, lease.problem_index, **changes)))


@dataclass
class Desk:
    """A ledger driven without a server, one transaction per call."""

    ledger: Ledger
    payloads: SegmentStore
    closed: bool = False

    @classmethod
    def open(cls, config: CoordinatorConfig, *, segment_bytes: int = 1 << 20) -> Desk:
        """Open the config's ledger."""
        config.data_dir.mkdir(parents=True, exist_ok=True)
        payloads = SegmentStore(config.data_dir / "payloads", segment_bytes=segment_bytes)
        ledger = Ledger(config.data_dir / "ledger.sqlite", config, payloads)
        payloads.check(ledger.payload_ends())
        return cls(ledger, payloads)

    def close(self) -> None:
        """Close both; once."""
        if not self.closed:
            self.ledger.close()
            self.payloads.close()
        self.closed = True

    def announce(self, size: int | None = 100, eval_size: int | None = None) -> None:
        """Announce the dataset."""
        with self.ledger.transaction():
            self.ledger.announce(size, eval_size)

    def lease(self, count: int, *, actor: str = ACTOR, request: str = "", cap: int = 64, served: Any = None) -> Grant:
        """Ask for leases, under a request id of its own unless one is given."""
        request = request or f"{actor}-{time.monotonic_ns()}"
        with self.ledger.transaction():
            return self.ledger.rollouts.lease(actor, request, count, cap, served)

    def submit(self, lease: Granted, **changes: Any) -> Any:
        """Submit a group for a lease."""
        with self.ledger.transaction():
            return self.ledger.rollouts.submit(submission_for(lease, **changes))

    def drop(self, lease: Granted, reason: str) -> Any:
        """Give a lease up."""
        with self.ledger.transaction():
            return self.ledger.rollouts.drop(lease.group_id, lease.fence, reason)

    def requeue(self, *leases: Granted, expired: bool = True) -> None:
        """Let leases expire."""
        with self.ledger.transaction():
            self.ledger.rollouts.requeue([(lease.group_id, lease.fence) for lease in leases], expired=expired)

    def start(self, step: int = 0) -> int:
        """Start a trainer; its epoch."""
        with self.ledger.transaction():
            return self.ledger.steps.start_trainer(step).epoch

    def batch(self, step: int, epoch: int = 1) -> Any:
        """Ask for a batch."""
        with self.ledger.transaction():
            return self.ledger.steps.batch(step, epoch)

    def commit(self, step: int, epoch: int = 1) -> None:
        """Commit a step."""
        with self.ledger.transaction():
            self.ledger.steps.commit(step, epoch, {"reward": 0.5})

    def checkpoint(self, step: int, oldest: int, epoch: int = 1) -> list[int]:
        """Note a checkpoint, delete what it makes superfluous and say what that was."""
        with self.ledger.transaction():
            gone = self.ledger.steps.checkpoint(epoch, step, oldest)
        self.payloads.delete(gone)
        return gone

    @property
    def states(self) -> dict[str, int]:
        """The states' counts."""
        return self.ledger.run.now.states


@dataclass
class RunningCoordinator:
    """A coordinator process that answers, leader of its own process group."""

    config: CoordinatorConfig
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def kill(self) -> None:
        """kill -9."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def log(self) -> str:
        """Its log."""
        return self.log_path.read_text(errors="replace")


def start_coordinator(directory: Path, config: CoordinatorConfig) -> RunningCoordinator:
    """Start ``python -m inflight_runtime.coordinator`` and wait until it is ready."""
    config_file, log_path = directory / "coordinator.json", directory / "coordinator.log"
    config_file.write_text(config.model_dump_json())
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inflight_runtime.coordinator", "--config", str(config_file)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    running = RunningCoordinator(config, f"http://127.0.0.1:{config.port}", process, log_path)
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{running.url}/readyz", timeout=2) as reply:
            if json.loads(reply.read())["ready"]:
                return running
        if process.poll() is not None or time.monotonic() > deadline:
            running.kill()
            raise AssertionError(f"the coordinator did not start:\n{running.log()}")
        time.sleep(0.05)


@contextlib.contextmanager
def coordinator(directory: Path, config: CoordinatorConfig) -> Iterator[RunningCoordinator]:
    """A running coordinator, killed at the end."""
    running = start_coordinator(directory, config)
    try:
        yield running
    finally:
        running.kill()
