"""The real process: started, killed at bad moments and started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.protocol import (
    DatasetInfo,
    Lease,
    LeaseReply,
    LeaseRequest,
    MemberBeat,
    MemberState,
    StepCommit,
    TrainerStart,
    VersionField,
)
from support.coordinators import TOKEN, coordinator, coordinator_config, group_for, start_coordinator
from support.ports import free_port

_requests = itertools.count()
GROUPS = 120


async def lease(client: CoordinatorClient, count: int, actor: str = "actor-0", wait: float = 0.0) -> LeaseReply:
    request = LeaseRequest(actor_id=actor, request_id=f"r{next(_requests)}", max_groups=count, wait_seconds=wait)
    return await client.lease(request)


async def submit(client: CoordinatorClient, held: Lease) -> None:
    await client.submit(group_for(held.group_id, held.fence, held.problem_index, text="x" * 2000))


async def test_kill_9_in_the_middle_of_submits_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    config = coordinator_config(
        tmp_path, port=free_port(), steps=GROUPS // 4, groups_per_step=4, max_staleness=100, max_leased_groups=1000
    )
    running = start_coordinator(tmp_path, config)
    acknowledged: list[int] = []
    reached = {10: asyncio.Event(), 50: asyncio.Event()}
    try:
        async with CoordinatorClient(running.url, TOKEN) as client:
            await client.announce_dataset(DatasetInfo(actor_id="actor-0", size=1000))
            epoch = (await client.start_trainer(TrainerStart(resume_step=0))).epoch
            held = (await lease(client, GROUPS)).leases
            assert len(held) == GROUPS

            async def actor(mine: list[Lease]) -> None:
                for group in mine:
                    await submit(client, group)
                    acknowledged.append(group.group_id)
                    if len(acknowledged) in reached:
                        reached[len(acknowledged)].set()

            actors = [asyncio.create_task(actor(held[number::8])) for number in range(8)]
            for event in reached.values():
                await event.wait()
                running.kill()
                at_kill = len(acknowledged)
                running = start_coordinator(tmp_path, config)
                state = await client.state()
                assert state.groups["completed"] >= at_kill
                assert state.groups["submitted"] == GROUPS == sum(state.groups.values()) - GROUPS
            await asyncio.gather(*actors)

            trained: list[int] = []
            for step in range(1, config.steps + 1):
                batch = await client.batch(step, epoch, 10)
                assert batch is not None
                trained += [group.group_id for group in batch.groups]
                await client.commit(step, StepCommit(epoch=epoch))
            state = await client.state()
        assert sorted(trained) == sorted(acknowledged) == [group.group_id for group in held]
        assert state.outcome == "succeeded"
        assert state.groups["trained"] == state.groups["submitted"] == GROUPS
        assert running.terminate() == 0
    finally:
        running.kill()


async def test_a_restart_keeps_leases_versions_and_lets_a_live_server_go_on_at_once(tmp_path: Path) -> None:
    config = coordinator_config(tmp_path, port=free_port(), max_leased_groups=None)
    beat = MemberBeat(
        server_id="s0", boot_id="b0", url="http://s0", engine="vllm", capacity=8, max_length=64, version=None
    )
    running = start_coordinator(tmp_path, config)
    try:
        async with CoordinatorClient(running.url, TOKEN) as client:
            await client.announce_dataset(DatasetInfo(actor_id="actor-0", size=1000))
            epoch = (await client.start_trainer(TrainerStart(resume_step=0))).epoch
            await client.beat(beat)
            version = VersionField(epoch=epoch, step=0)
            await client.set_member_state("s0", MemberState(epoch=epoch, boot_id="b0", state="READY", version=version))
            first, second = (await lease(client, 2)).leases
            await submit(client, first)
            members = await client.members()

            running.kill()
            running = start_coordinator(tmp_path, config)
            assert (await lease(client, 1)).reason == "no ready server"
            reply = await client.beat(beat.model_copy(update={"version": version}))
            assert (reply.known, reply.state) == (False, "READY")
            assert (await client.members(members.revision, 5)).revision > members.revision
            await submit(client, second)
            batch = await client.batch(1, epoch, 10)
            assert batch is not None
            assert [group.group_id for group in batch.groups] == [first.group_id, second.group_id]
            assert [again.group_id for again in (await lease(client, 1)).leases] == [2]
    finally:
        running.kill()


async def test_sigterm_finishes_what_is_under_way_and_folds_the_log_in(tmp_path: Path) -> None:
    config = coordinator_config(tmp_path, port=free_port())
    with coordinator(tmp_path, config) as running:
        async with CoordinatorClient(running.url, TOKEN, retry_for_s=0) as client:
            await client.announce_dataset(DatasetInfo(actor_id="actor-0", size=1000))
            await lease(client, 4)
            poll = asyncio.create_task(lease(client, 1, wait=25))
            await asyncio.sleep(0.2)
            code = await asyncio.to_thread(running.terminate)
            assert code == 0
            assert (await poll).leases == []
        assert "Traceback" not in running.log()
        assert not list(config.data_dir.glob("*-wal"))


def run_main(directory: Path, config: Any, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    file = directory / "second.json"
    file.write_text(config if isinstance(config, str) else config.model_dump_json())
    command = [sys.executable, "-m", "inflight_runtime.coordinator", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_second_coordinator_on_the_same_data_is_refused(tmp_path: Path) -> None:
    config = coordinator_config(tmp_path, port=free_port())
    with coordinator(tmp_path, config):
        done = run_main(tmp_path, config.model_copy(update={"port": free_port()}))
    assert done.returncode == 1
    assert "another coordinator uses" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_and_bad_input_are_told_in_one_message(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = run_main(tmp_path, coordinator_config(tmp_path, port=port))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    done = run_main(tmp_path, '{"job": "x"}')
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    config = coordinator_config(tmp_path, port=free_port())
    config.token_file.write_text("\n")
    done = run_main(tmp_path, config)
    assert (done.returncode, "is empty" in done.stderr) == (2, True)


def test_another_jobs_data_directory_is_refused(tmp_path: Path) -> None:
    config = coordinator_config(tmp_path, port=free_port())
    with coordinator(tmp_path, config) as running:
        assert running.terminate() == 0
    done = run_main(tmp_path, config.model_copy(update={"job": "another"}))
    assert done.returncode == 1
    assert "use a fresh run directory" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    config = coordinator_config(tmp_path, port=free_port())
    with coordinator(tmp_path, config) as running:
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert children == []
        running.process.send_signal(number)
        assert running.process.wait(20) == 0
