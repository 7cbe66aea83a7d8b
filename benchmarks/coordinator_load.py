"""Load on a real coordinator process: groups per second, its share of one core, its memory.

``python benchmarks/coordinator_load.py --groups-per-second 100 --seconds 20`` prints one JSON. Actors lease, submit
groups of ``--group-size`` answers and the trainer takes and commits batches, as in a run; ``--groups-per-second 0``
goes as fast as it can.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import psutil

from inflight_runtime.config.roles import CoordinatorConfig
from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.protocol import (
    CheckpointDurable,
    DatasetInfo,
    Lease,
    LeaseRequest,
    MemberBeat,
    MemberState,
    StepCommit,
    TrainerStart,
    VersionField,
)
from inflight_runtime.types import Attempt, Group, Span, make_segment

TOKEN = "load"


def group_for(lease: Lease, tokens: int, rng: np.random.Generator) -> Group:
    attempts = []
    for _ in range(lease.attempts):
        segment = make_segment(
            rng.integers(0, 1000, tokens),
            [True] * tokens,
            -rng.random(tokens),
            [Span(1, 0, 0, tokens, "server-0", "boot-0")],
        )
        attempts.append(Attempt(segments=(segment,), reward=float(rng.integers(0, 2)), text="x" * tokens))
    prompt = np.arange(24, dtype=np.int32)
    return Group(lease.group_id, lease.fence, lease.problem_index, prompt, tuple(attempts), "sort these letters")


class Pace:
    """Lets through ``rate`` per second; 0: everything."""

    def __init__(self, rate: float) -> None:
        self._gap = 1 / rate if rate else 0.0
        self._next = time.monotonic()

    async def __call__(self) -> None:
        self._next += self._gap
        await asyncio.sleep(max(0.0, self._next - time.monotonic()))


async def actor(client: CoordinatorClient, name: str, tokens: int, pace: Pace, seen: list[float]) -> None:
    concurrency = 16
    rng = np.random.default_rng(0)
    free = asyncio.Semaphore(concurrency)
    tasks: set[asyncio.Task[None]] = set()

    async def work(lease: Lease) -> None:
        await pace()
        begun = time.monotonic()
        await client.submit(group_for(lease, tokens, rng))
        seen.append(time.monotonic() - begun)
        free.release()

    while True:
        await free.acquire()
        wanted = 1
        while wanted < concurrency and not free.locked():
            await free.acquire()
            wanted += 1
        reply = await client.lease(LeaseRequest(actor_id=name, request_id=uuid.uuid4().hex, max_groups=wanted))
        for _ in range(wanted - len(reply.leases)):
            free.release()
        for lease in reply.leases:
            task = asyncio.create_task(work(lease))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if reply.finished:
            return


async def trainer(client: CoordinatorClient) -> None:
    started = await client.start_trainer(TrainerStart(resume_step=0))
    for number in range(2):
        await client.set_member_state(
            f"server-{number}",
            MemberState(epoch=started.epoch, boot_id="boot", state="READY", version=VersionField(epoch=1, step=0)),
        )
    step = 1
    while step <= started.steps:
        batch = await client.batch(step, started.epoch, 10)
        if batch is None:
            continue
        await client.commit(step, StepCommit(epoch=started.epoch, metrics={"reward": 0.5}))
        for number in range(2):
            for state in ("UPDATING", "READY"):
                await client.set_member_state(
                    f"server-{number}",
                    MemberState(
                        epoch=started.epoch,
                        boot_id="boot",
                        state=state,
                        version=VersionField(epoch=started.epoch, step=step),
                    ),
                )
        if step % 10 == 0:
            await client.checkpoint(CheckpointDurable(epoch=started.epoch, step=step, oldest_step=max(0, step - 20)))
        step += 1


async def server(client: CoordinatorClient, number: int) -> None:
    while True:
        await client.beat(
            MemberBeat(
                server_id=f"server-{number}",
                boot_id="boot",
                url="http://127.0.0.1:1",
                engine="vllm",
                capacity=512,
                max_length=128,
            )
        )
        await asyncio.sleep(1)


async def watcher(client: CoordinatorClient) -> None:
    revision = -1
    while True:
        revision = (await client.members(revision, 10)).revision


async def measure(options: argparse.Namespace, url: str, process: psutil.Process) -> dict[str, object]:
    pace, latencies = Pace(options.groups_per_second), list[float]()
    async with CoordinatorClient(url, TOKEN) as client, asyncio.TaskGroup() as tasks:
        await client.announce_dataset(DatasetInfo(actor_id="actor-0", size=10_000))
        running = [tasks.create_task(server(client, number)) for number in range(2)]
        await asyncio.sleep(0.3)
        running += [
            tasks.create_task(trainer(client)),
            tasks.create_task(watcher(client)),
            *(
                tasks.create_task(actor(client, f"actor-{number}", options.tokens, pace, latencies))
                for number in range(options.actors)
            ),
        ]
        await asyncio.sleep(2)
        before, cpu, latencies[:] = await client.state(), process.cpu_times(), []
        begun = time.monotonic()
        await asyncio.sleep(options.seconds)
        elapsed, after, spent = time.monotonic() - begun, await client.state(), process.cpu_times()
        for task in running:
            task.cancel()
    groups = after.groups["completed"] + after.groups["assigned"] + after.groups["trained"]
    groups -= before.groups["completed"] + before.groups["assigned"] + before.groups["trained"]
    return {
        "groups_per_second": round(groups / elapsed, 1),
        "steps_per_second": round((after.step - before.step) / elapsed, 2),
        "cpu_share_of_one_core": round((spent.user + spent.system - cpu.user - cpu.system) / elapsed, 4),
        "pss_mb": round(process.memory_full_info().pss / 1e6, 1),
        "submit_ms_p50": round(1000 * float(np.percentile(latencies, 50)), 2),
        "submit_ms_p95": round(1000 * float(np.percentile(latencies, 95)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups-per-second", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--profile", type=Path, help="write a cProfile of the coordinator here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        token_file, config_file = Path(directory, "token"), Path(directory, "coordinator.json")
        token_file.write_text(TOKEN)
        config = CoordinatorConfig(
            job="load",
            port=port,
            data_dir=Path(directory, "data"),
            token_file=token_file,
            steps=1_000_000,
            groups_per_step=8,
            group_size=options.group_size,
            max_staleness=4,
        )
        config_file.write_text(config.model_dump_json())
        profiler = ["-m", "cProfile", "-o", str(options.profile)] if options.profile else []
        process = subprocess.Popen(
            [sys.executable, *profiler, "-m", "inflight_runtime.coordinator", "--config", str(config_file)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            result = asyncio.run(measure(options, f"http://127.0.0.1:{port}", psutil.Process(process.pid)))
            print(json.dumps(result))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


if __name__ == "__main__":
    main()
