"""Everything before the first process: the job, its checks, ports, the run's directory and the role configs."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inflight_runtime.api import JobError, Problem, RLTrainingJob
from inflight_runtime.config.checks import check_local_run, raise_for
from inflight_runtime.config.render import LocalLayout, RenderedRun, render_local, write_role_configs
from inflight_runtime.local.machine import LOOPBACK, Machine, Prepared, RunPorts, inspect_machine, take_ports
from inflight_runtime.local.overrides import load_with_overrides
from inflight_runtime.local.ports import PortPool
from inflight_runtime.local.result import RunResult
from inflight_runtime.local.rundir import RunDirectory, RunDirectoryError, RunRecord, new_run_path, point_latest


def checked_job(job_file: Path, overrides: Sequence[str], job_dir: Path) -> tuple[RLTrainingJob, Machine]:
    """Read a job and check it against this machine.

    Args:
        job_file: the file to read.
        overrides: ``path=value`` each.
        job_dir: where relative paths in it start.

    Raises:
        JobError: with everything that is wrong.
    """
    job = load_with_overrides(job_file, overrides)
    machine = inspect_machine(job)
    raise_for(check_local_run(job, job_dir, machine.device, machine.gpus), str(job_file))
    return job, machine


def prepare_run(
    job_file: Path, overrides: Sequence[str], run_dir: Path | None, coordinator_port: int | None
) -> Prepared:
    """Check a new run and make its directory. Nothing is made when anything is wrong.

    Raises:
        JobError: the job cannot run here.
        RunDirectoryError: its directory cannot be used.
    """
    job, machine = checked_job(job_file, overrides, job_file.absolute().parent)
    ports = PortPool()
    chosen = take_ports(job, ports, coordinator_port)
    directory = RunDirectory(run_dir or new_run_path(Path("runs"), job.name))
    record = RunRecord(job.name, str(job_file.absolute()), tuple(overrides))
    directory.create(job_file.read_text(encoding="utf-8-sig"), record)
    directory.lock()
    if run_dir is None:
        point_latest(directory.path)
    rendered = render(job, machine, directory, job_file.absolute().parent, chosen)
    return _finish(Prepared(job, rendered, directory, machine, ports), record)


def prepare_resume(run_dir: Path, overrides: Sequence[str], coordinator_port: int | None) -> Prepared:
    """Check a run that is to go on.

    Raises:
        JobError: the job cannot run here any more.
        RunDirectoryError: this is no run directory, or its run is still going on.
    """
    directory = RunDirectory(run_dir)
    record = directory.read_record()
    if record.outcome:
        raise RunDirectoryError(
            f"--resume: the run in {run_dir} is over ({record.outcome}); start a new one, and set "
            f"spec.checkpoint.resumeFrom to {directory.checkpoints} if it is to go on from these weights"
        )
    directory.lock()
    every = (*record.overrides, *overrides)
    job_dir = Path(record.job_file).parent
    job, machine = checked_job(directory.job_file, every, job_dir)
    if job.name != record.job:
        raise JobError([Problem("metadata.name", job.name, f"this run is {record.job}", "start a new run for it")])
    ports = PortPool()
    chosen = take_ports(job, ports, coordinator_port)
    rendered = render(job, machine, directory, job_dir, chosen)
    return _finish(Prepared(job, rendered, directory, machine, ports), replace(record, overrides=every))


def _finish(prepared: Prepared, record: RunRecord) -> Prepared:
    """Write the role configs and where the run is to be found."""
    directory = prepared.directory
    try:
        write_role_configs(prepared.rendered, directory.config)
    except OSError as error:
        raise RunDirectoryError(f"{directory.config} cannot be written: {error.strerror or error}") from error
    url = f"http://{LOOPBACK}:{prepared.rendered.coordinator.port}"
    directory.write_record(replace(record, coordinator_url=url, pid=os.getpid(), started=time.time()))
    return prepared


def note_end(prepared: Prepared, result: RunResult) -> None:
    """Write down that the run is over, if it is: one that was stopped or has lost a role may go on."""
    if result.over:
        record = prepared.directory.read_record()
        prepared.directory.write_record(replace(record, outcome=result.outcome, reason=result.reason))


def render(
    job: RLTrainingJob, machine: Machine, directory: RunDirectory, job_dir: Path, ports: RunPorts
) -> RenderedRun:
    """Render the role configs of a run on this machine."""
    layout = LocalLayout(
        job_dir=job_dir,
        token_file=directory.token_file,
        coordinator_port=ports.coordinator,
        server_ports=ports.servers,
        actor_health_ports=ports.actors,
        host=LOOPBACK,
        device=machine.device,
        server_threads=machine.threads,
        trainer_threads=machine.threads,
    )
    return render_local(job, directory.path, layout)


def render_example(job_file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Render a job without a run directory, for reading: the configs by process name.

    Raises:
        JobError: the job cannot run here.
    """
    job_dir = job_file.absolute().parent
    job, machine = checked_job(job_file, overrides, job_dir)
    directory = RunDirectory(Path("runs") / job.name)
    rendered = render(job, machine, directory, job_dir, take_ports(job, PortPool(), None))
    with tempfile.TemporaryDirectory(prefix="inflight-render-") as scratch:
        files = write_role_configs(rendered, Path(scratch))
        return {name: json.loads(path.read_text()) for name, path in files.items()}
