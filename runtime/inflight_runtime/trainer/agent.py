"""Torch's elastic agent of one node's ranks, and what it ends with; started by :mod:`.launch`."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args, parse_min_max_nnodes

from inflight_runtime.trainer.failure import EXIT_BAD_INPUT, EXIT_FAILED
from inflight_runtime.trainer.signals import END_SIGNALS, EarlyEnd

logger = logging.getLogger("inflight_runtime.trainer.launch")


def exit_code(codes: Mapping[int, int]) -> int:
    """The exit code of ranks that ended together; 0 when none of them failed.

    Args:
        codes: what each rank ended with; negative for a signal, as :mod:`subprocess` has it.
    """
    rank = first_cause(codes)
    return 0 if rank is None else shell_code(codes[rank])


def first_cause(codes: Mapping[int, int]) -> int | None:
    """The rank whose failure is the cause of the others'; ``None`` when none failed."""
    failed = [rank for rank, code in codes.items() if code]
    # A rank that loses another one ends with 1, so that a 1 beside anything else is an effect.
    return min(failed, key=lambda rank: (codes[rank] == EXIT_FAILED, rank), default=None)


def shell_code(code: int) -> int:
    """An exit code as shells have it: 128 + the number of the signal that ended the process."""
    return 128 - code if code < 0 else code


def reasons(failures: Mapping[int, ProcessFailure], code: int) -> dict[int, str]:
    """What the ranks that ended with ``code`` have left by :func:`~inflight_runtime.trainer.failure.tell_launcher`."""
    alike = {rank: failure for rank, failure in failures.items() if failure.exitcode == code}
    return {rank: failure.message for rank, failure in alike.items() if Path(failure.error_file).is_file()}


class Agent(LocalElasticAgent):
    """Torch's agent of one node, which also remembers the exit codes of its ranks."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, early_end: EarlyEnd) -> None:
        assert config.logs_specs is not None and config.shutdown_timeout is not None  # LaunchConfig fills them in
        super().__init__(
            spec,
            config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        self._early_end = early_end
        self.failed_first: dict[int, int] = {}
        """Exit codes by rank of those that had failed when the first failure was seen, before the others were ended."""

    def codes(self) -> dict[int, int]:
        """Exit codes by rank of those that have ended."""
        ended = {}
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        for worker in self.get_worker_group().workers:
            handler = handlers.get(worker.local_rank)
            if handler is not None and (code := handler.proc.poll()) is not None:
                ended[worker.global_rank] = code
        return ended

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        _raise_at_signals()
        self._early_end.over()
        started: dict[int, Any] = super()._start_workers(worker_group)
        _raise_at_signals()  # torch has set its own handler, which breaks off a shutdown when a second signal comes
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # The agent's own look ends the others at once when it finds a failure, and their codes look like the first's.
        if not self.failed_first:
            self.failed_first = {rank: code for rank, code in self.codes().items() if code}
        result: RunResult = super()._monitor_workers(worker_group)
        if not self.failed_first:
            self.failed_first = {rank: failure.exitcode for rank, failure in result.failures.items()}
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # A second signal would break off the wait for the ranks' checkpoint and leave them behind.
        _ignore_signals()
        super()._shutdown(death_sig, timeout)


def launch(arguments: Sequence[str], early_end: EarlyEnd) -> int:
    """Run the ranks of this node to their end.

    Args:
        arguments: torchrun's whole command line, with the module or script.
        early_end: installed; over when the ranks are started.

    Returns:
        The exit code; see the module.
    """
    try:
        agent = _agent(arguments, early_end)
    except (ValueError, AssertionError) as error:
        logger.error("cannot start the trainer's ranks: %s", error)
        return EXIT_BAD_INPUT
    try:
        result: RunResult = agent.run()
    except SignalException as signalled:
        return _after_signal(agent, signalled.sigval)
    except Exception as error:
        logger.error("the trainer's ranks could not be started: %s", error)
        return EXIT_FAILED
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    rank = first_cause(agent.failed_first)
    if rank is None:
        return 0 if result.state is WorkerState.SUCCEEDED else EXIT_FAILED
    code = agent.failed_first[rank]
    told = reasons(result.failures, code)
    if rank not in told:  # rank 0 has a reason, and the others may end a moment before it with the code that it tells
        rank = min(told, default=rank)
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    logger.error("rank %d failed, %s%s", rank, how, f": {told[rank]}" if rank in told else "")
    return shell_code(code)


def _agent(arguments: Sequence[str], early_end: EarlyEnd) -> Agent:
    """Make the agent as torchrun does.

    Raises:
        ValueError, AssertionError: the options make no sense.
    """
    options = parse_args(list(arguments))  # type: ignore[no-untyped-call]
    _, most_nodes = parse_min_max_nnodes(options.nnodes)
    nowhere = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (nowhere and most_nodes == 1):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if options.master_port is None:
        options.master_port = 29_500
    config, entrypoint, rank_arguments = config_from_args(options)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    static = config.rdzv_backend == "static"
    master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1) if static else (None, None)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(rank_arguments),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master[0],
        master_port=master[1],
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    return Agent(spec, config, early_end)


def _after_signal(agent: Agent, told: signal.Signals) -> int:
    codes = agent.codes()
    if not codes:
        logger.info("%s before the ranks were started", told.name)
        return 128 + told
    ended = ", ".join(f"rank {rank} with exit code {shell_code(code)}" for rank, code in sorted(codes.items()))
    logger.info("%s: the ranks have ended, %s", told.name, ended)
    return exit_code(codes)


def _raise_at_signals() -> None:
    for signum in END_SIGNALS:
        signal.signal(signum, _raise)


def _raise(signum: int, _: FrameType | None) -> None:
    _ignore_signals()
    raise SignalException(f"this node is told to end: {signum}", signal.Signals(signum))


def _ignore_signals() -> None:
    for signum in (*END_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
