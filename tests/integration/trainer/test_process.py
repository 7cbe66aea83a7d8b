"""The trainer as a process of its own against a real coordinator; the test plays the actor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.config.roles import CheckpointConfig, TrainerConfig
from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.protocol import DatasetInfo, LeaseRequest, RunState, TrainerStart
from inflight_runtime.trainer.manifest import read_checkpoint
from support.coordinators import TOKEN, RunningCoordinator, coordinator, coordinator_config
from support.ports import free_port
from support.tiny_models import make_tiny_model
from support.trainer_fakes import random_group, trainer_config

STEPS = 6
DEADLINE_S = 240.0
SMALL_DISK_BYTES = 200_000
"""Less than the weights of a tiny model."""
pytestmark = pytest.mark.timeout(900)


@dataclass
class Setting:
    """A running coordinator, a trainer's config and an actor that can hand in groups."""

    directory: Path
    running: RunningCoordinator
    config: TrainerConfig
    background: BackgroundLoop
    client: CoordinatorClient
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def state(self) -> RunState:
        return self.background.run(self.client.state(), 20)

    def hand_in(self, groups: int) -> None:
        """Lease and submit this many groups, as actors do, waiting for admission."""
        self.background.run(self._hand_in(groups), DEADLINE_S)

    async def _hand_in(self, groups: int) -> None:
        await self.client.announce_dataset(DatasetInfo(actor_id="actor-0", size=1000))
        while groups:
            reply = await self.client.lease(
                LeaseRequest(
                    actor_id="actor-0", request_id=str(time.monotonic_ns()), max_groups=groups, wait_seconds=5.0
                )
            )
            for lease in reply.leases:
                rng = np.random.default_rng(lease.problem_index)
                group = random_group(rng, lease.group_id, version=(lease.min_version.epoch, lease.min_version.step))
                await self.client.submit(
                    type(group)(
                        lease.group_id,
                        lease.fence,
                        lease.problem_index,
                        group.prompt_ids,
                        group.attempts,
                        group.prompt_text,
                    )
                )
            groups -= len(reply.leases)

    def start(self, *launcher: str, name: str = "trainer", **changes: Any) -> subprocess.Popen[bytes]:
        config_file = self.directory / f"{name}.json"
        config_file.write_text(self.config.model_copy(update=changes).model_dump_json())
        command = [sys.executable, *launcher, "-m", "inflight_runtime.trainer", "--config", str(config_file)]
        with self.log(name).open("ab") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        return self.processes[-1]

    def log(self, name: str = "trainer") -> Path:
        return self.directory / f"{name}.log"

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace") for path in self.directory.glob("*.log"))
                raise AssertionError(f"not in time: {what}\n{logs}")
            time.sleep(0.05)

    def ends_with(self, process: subprocess.Popen[bytes], code: int, name: str = "trainer") -> None:
        assert process.wait(DEADLINE_S) == code, self.log(name).read_text(errors="replace")


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    model = make_tiny_model(tmp_path / "model", initializer_range=0.1)
    settings = coordinator_config(
        tmp_path, port=free_port(), steps=STEPS, group_size=4, max_staleness=STEPS, max_leased_groups=64
    )
    with coordinator(tmp_path, settings) as running:
        config = trainer_config(
            tmp_path,
            model,
            steps=STEPS,
            max_staleness=STEPS,
            coordinator_url=running.url,
            token_file=settings.token_file,
            checkpoint=CheckpointConfig(dir=tmp_path / "checkpoints", every_steps=2),
        )
        background = BackgroundLoop("test")
        client = CoordinatorClient(running.url, TOKEN)
        setting = Setting(tmp_path, running, config, background, client)
        try:
            yield setting
        finally:
            background.run(client.aclose(), 10)
            background.close()
            for process in setting.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def metrics(setting: Setting) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (setting.directory / "logs/metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_to_the_end_under_torchrun(setting: Setting) -> None:
    process = setting.start("-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone")
    setting.hand_in(2 * STEPS)
    setting.ends_with(process, 0)
    state = setting.state()
    assert (state.outcome, state.step, state.checkpoint_step) == ("succeeded", STEPS, STEPS)
    assert state.groups["trained"] == 2 * STEPS
    assert [line["step"] for line in metrics(setting)] == list(range(1, STEPS + 1))
    saved = read_checkpoint(setting.directory / f"checkpoints/step-{STEPS:08d}")
    assert AutoModelForCausalLM.from_pretrained(saved.path / "model").config.vocab_size == 264


def test_sigterm_ends_with_a_checkpoint_and_the_run_goes_on_from_it(setting: Setting) -> None:
    process = setting.start()
    setting.hand_in(6)
    setting.wait_until(lambda: setting.state().step == 3, "step 3")
    process.send_signal(signal.SIGTERM)
    setting.ends_with(process, 128 + signal.SIGTERM)
    assert setting.state().checkpoint_step == 3
    again = setting.start()
    setting.hand_in(2 * STEPS - 6)
    setting.ends_with(again, 0)
    assert setting.state().outcome == "succeeded"
    assert [(line["epoch"], line["step"]) for line in metrics(setting)] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 4),
        (2, 5),
        (2, 6),
    ]


def test_kill_9_replays_from_the_newest_checkpoint_on_the_same_groups(setting: Setting) -> None:
    process = setting.start()
    setting.hand_in(6)
    setting.wait_until(lambda: setting.state().step == 3, "step 3")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    again = setting.start()
    setting.hand_in(2 * STEPS - 6)
    setting.ends_with(again, 0)
    state = setting.state()
    assert state.groups["submitted"] == state.groups["trained"] == 2 * STEPS
    lines = metrics(setting)
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)]
    assert lines[2]["loss"] == lines[3]["loss"], "step 3 is trained again on the same groups from the same weights"


def test_a_trainer_that_was_superseded_says_so_and_ends(setting: Setting) -> None:
    process = setting.start()
    setting.hand_in(2)
    setting.wait_until(lambda: setting.state().step == 1, "step 1")
    setting.background.run(setting.client.start_trainer(TrainerStart(resume_step=0)), 20)
    setting.ends_with(process, 3)
    assert "another trainer has taken over" in setting.log().read_text()


def test_a_coordinator_that_is_killed_and_restarted_costs_nothing(setting: Setting, tmp_path: Path) -> None:
    process = setting.start()
    setting.hand_in(4)
    setting.wait_until(lambda: setting.state().step == 2, "step 2")
    setting.running.kill()
    with coordinator(tmp_path, setting.running.config):
        setting.hand_in(2 * STEPS - 4)
        setting.ends_with(process, 0)
        assert setting.state().groups["trained"] == 2 * STEPS
    assert {line["epoch"] for line in metrics(setting)} == {1}


def no_room(process: subprocess.Popen[bytes], size: int = SMALL_DISK_BYTES) -> None:
    """From now on no file of the process grows beyond this, as on a full disk; its logs are smaller."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_the_one_before_stays(setting: Setting) -> None:
    stopped = setting.start(name="stopped")
    setting.hand_in(6)
    setting.wait_until(lambda: setting.state().checkpoint_step == 2 and setting.state().step == 3, "step 3")
    no_room(stopped)
    stopped.send_signal(signal.SIGTERM)
    setting.ends_with(stopped, 1, name="stopped")
    message = "checkpoint of step {} could not be written to .*File too large .* The one of step {} is untouched"
    assert re.search(message.format(3, 2), setting.log("stopped").read_text())

    last = setting.start(name="last")
    setting.hand_in(2 * STEPS - 7)
    setting.wait_until(lambda: setting.state().checkpoint_step == STEPS - 2, f"the checkpoint of step {STEPS - 2}")
    no_room(last)
    setting.hand_in(1)
    setting.ends_with(last, 1, name="last")
    assert re.search(message.format(STEPS, STEPS - 2), setting.log("last").read_text())
    assert (setting.state().outcome, setting.state().step) == ("running", STEPS - 1)

    setting.ends_with(setting.start(), 0)
    assert setting.state().outcome == "succeeded"
    assert sorted(path.name for path in (setting.directory / "checkpoints").glob(".*")) == []


def test_bad_input_ends_at_once_with_one_message(tmp_path: Path) -> None:
    config = trainer_config(tmp_path, tmp_path)
    config.token_file.write_text("token")
    (tmp_path / "bad.json").write_text(config.model_dump_json())
    result = subprocess.run(
        [sys.executable, "-m", "inflight_runtime.trainer", "--config", str(tmp_path / "bad.json")],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 2
    assert f"model {tmp_path} cannot be loaded" in result.stderr
    assert "Traceback" not in result.stderr
