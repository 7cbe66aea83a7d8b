"""Several ranks, one trainer: rank 0 runs the loop, and the others do what it tells them.

Rank 0 alone talks to the coordinator, publishes and owns the checkpoint directory. Before each collective part of the
loop it sends the others a command, over a gloo group beside the engine's own: a JSON header with NumPy arrays, nothing
that is unpickled.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from inflight_runtime.config.roles import LossConfig, TrainerConfig
from inflight_runtime.trainer.contract import EngineError, EngineInfo, StepStats, TokenStats, TrainerEngine
from inflight_runtime.trainer.losses import policy_loss
from inflight_runtime.trainer.packing import MicroBatch
from inflight_runtime.trainer.signals import StopRequest

logger = logging.getLogger(__name__)

COLLECTIVE_DEADLINE_S: Final = 600.0
"""Of one collective of an engine."""
COMMAND_DEADLINE_S: Final = 3600.0
"""Between two commands of rank 0, which may hash a large checkpoint in between; a rank that dies is noticed at once."""
END_DEADLINE_S: Final = 30.0
"""For the other ranks to hear that the run is over."""
POLL_S: Final = 1.0
"""How often rank 0 asks for signals while it waits for a batch."""
_ERROR_BYTES: Final = 1024
_HEADER: Final = "header"


class RankError(RuntimeError):
    """Another rank could not do its part; the message has the rank and its reason."""


def join_group(device: str) -> torch.device:
    """Join the default process group, as torchrun's environment says: gloo for the CPU, nccl beside it for CUDA.

    A process that nobody told of others makes a group of its own.

    Returns:
        The rank's device.

    Raises:
        EngineError: there is no GPU for this rank, or the environment is not torchrun's.
        RankError: the ranks did not meet, which another start may mend.
    """
    backend, place = "gloo", torch.device("cpu")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise EngineError("trainer device is 'cuda' and torch sees no CUDA device; set it to 'cpu' or find the GPU")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if local_rank >= torch.cuda.device_count():
            raise EngineError(
                f"local rank {local_rank} has no GPU of its own: torch sees {torch.cuda.device_count()}; "
                "lower spec.trainer.processesPerNode to their number"
            )
        torch.cuda.set_device(local_rank)
        backend, place = "cpu:gloo,cuda:nccl", torch.device("cuda", local_rank)
    if dist.is_initialized():
        return place
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S))
    except ValueError as error:
        raise EngineError(f"the ranks cannot meet (are they started as torchrun does?): {error}") from error
    except RuntimeError as error:
        raise RankError(f"the ranks of the trainer did not meet: {error}") from error
    return place


def fail_together(failure: Exception | None, group: Any = None) -> None:
    """Fail on every rank when one has failed. A collective on the CPU.

    Args:
        failure: what went wrong here.
        group: of the ranks; by default all.

    Raises:
        Exception: ``failure``.
        EngineError: another rank has one, which no other start mends.
        RankError: another rank failed in any other way.
    """
    final = isinstance(failure, EngineError)
    text = b"" if failure is None else (b"!" if final else b"?") + (f"{failure}" or repr(failure)).encode()
    mine = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text[:_ERROR_BYTES]), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, mine, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(texts):
        if reason := other.numpy().tobytes().rstrip(b"\0").decode(errors="replace"):
            kind = EngineError if reason[0] == "!" else RankError
            raise kind(f"rank {rank}: {reason[1:]}")


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """What rank 0 wants done: a kind, its JSON fields, and the micro-batches of the rank that hears it."""

    kind: str
    fields: dict[str, Any]
    micro_batches: list[MicroBatch]


class Team:
    """The ranks of one trainer. The default is a team of one, for which everything here is free."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """Make the team; with more than one rank all of them must, at the same time, after :func:`join_group`."""
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._polled = 0.0
        if size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_DEADLINE_S))

    @classmethod
    def join(cls, device: str, size: int) -> Team:
        """Meet the other ranks.

        Raises:
            EngineError, RankError: see :func:`join_group`.
        """
        if size == 1:
            return cls()
        join_group(device)
        return cls(dist.get_rank(), dist.get_world_size())

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, plan: Sequence[Sequence[MicroBatch]] = (), **values: Any) -> None:
        """Send a command to the others, with ``plan[r]`` for rank r."""
        if self.size == 1:
            return
        header = {"kind": kind, "counts": [len(batches) for batches in plan], "fields": values}
        arrays = {
            f"{rank}.{number}.{field.name}": getattr(batch, field.name)
            for rank, batches in enumerate(plan)
            for number, batch in enumerate(batches)
            for field in fields(MicroBatch)
        }
        buffer = io.BytesIO()
        np.savez(
            buffer, allow_pickle=False, **arrays, **{_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
        )
        payload = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), 0, self._group)
        dist.broadcast(payload, 0, self._group)

    def hand_out(self, plan: Sequence[Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
        """Give every rank its micro-batches of a step; returns rank 0's own. An empty step is nobody's work."""
        if plan[0]:
            self.tell("step", plan)
        return plan[0]

    def end(self, code: int) -> None:
        """Tell the others to end with this exit code; one that is gone already costs a line in the log."""
        if self.size == 1:
            return
        try:
            self.tell("end", code=code)
            self._farewell()
        except RuntimeError as error:
            logger.warning("not every rank could be told of the end: %s", str(error).partition(". ")[0])

    # --- the others ---------------------------------------------------------------------------------------------------

    def hear(self) -> Command:
        """Wait for rank 0's next command.

        Raises:
            RuntimeError: rank 0 is gone, or silent for :data:`COMMAND_DEADLINE_S`.
        """
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, self._group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(payload, 0, self._group)
        with np.load(io.BytesIO(payload.numpy().tobytes()), allow_pickle=False) as arrays:
            header = json.loads(arrays[_HEADER].tobytes())
            count = header["counts"][self.rank] if header["counts"] else 0
            batches = [
                MicroBatch(**{field.name: arrays[f"{self.rank}.{number}.{field.name}"] for field in fields(MicroBatch)})
                for number in range(count)
            ]
        return Command(header["kind"], header["fields"], batches)

    def leave(self) -> None:
        """Answer :meth:`end`."""
        self._farewell()

    # --- all together -------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, on the CPU."""
        if self.size == 1:
            return values
        total = values.cpu()
        dist.all_reduce(total, group=self._group)
        return total

    def stopping(self, stop: StopRequest) -> bool:
        """Whether a rank has had a signal, asked no more than every :data:`POLL_S`; ``stop`` then knows it, too."""
        if self.size > 1 and (self.rank or time.monotonic() - self._polled >= POLL_S):
            if self.rank == 0:
                self.tell("poll")
            signum = torch.tensor([stop.signum or 0])
            dist.all_reduce(signum, dist.ReduceOp.MAX, self._group)
            if signum:
                stop.note(int(signum))
            self._polled = time.monotonic()
        return stop.requested

    def attempt(self, work: Callable[[], None]) -> None:
        """Do work that may fail on some ranks and not on others; it then fails on all.

        Raises:
            EngineError, RankError: it failed on another rank.
            Exception: what it raised here.
        """
        if self.size == 1:
            work()
            return
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        fail_together(failure, self._group)

    def _farewell(self) -> None:
        dist.barrier(self._group, async_op=True).wait(timedelta(seconds=END_DEADLINE_S))


class LeadingEngine:
    """Rank 0's engine: each collective is announced to the others before it begins."""

    def __init__(self, engine: TrainerEngine, team: Team) -> None:
        """Lead ``team``, whose other ranks are in :func:`follow` with an engine of the same kind."""
        self._engine = engine
        self._team = team

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """See the contract."""
        self._team.tell("init", resume=None if resume is None else str(resume), step=step)
        return self._engine.init(config, resume, step)

    def forward(self, batch: MicroBatch) -> TokenStats:
        """See the contract; :meth:`Team.hand_out` has told the others."""
        return self._engine.forward(batch)

    def backward(self, loss: Tensor, last: bool) -> None:
        """See the contract."""
        self._engine.backward(loss, last)

    def optimizer_step(self, *, skip: bool = False) -> StepStats:
        """See the contract."""
        self._team.tell("optimize", skip=skip)
        return self._engine.optimizer_step(skip=skip)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See the contract."""
        self._team.tell("export")
        yield from self._engine.export_weights()

    def save(self, directory: Path) -> None:
        """See the contract.

        Raises:
            RankError: another rank could not write its part.
        """
        self._team.tell("save", directory=str(directory))
        self._team.attempt(lambda: self._engine.save(directory))

    def close(self) -> None:
        """See the contract; the others close theirs when :meth:`Team.end` tells them."""
        self._engine.close()


def follow(config: TrainerConfig, engine: TrainerEngine, team: Team, stop: StopRequest) -> int:
    """Do what rank 0 commands until it says that the run is over; returns the exit code that it gives.

    Raises:
        EngineError: the model cannot be loaded or trained; rank 0 finds the same.
        RuntimeError: rank 0 is gone.
    """
    loaded = False
    while True:
        command = team.hear()
        values = command.fields
        match command.kind:
            case "init":
                resume = values["resume"]
                engine.init(config, None if resume is None else Path(resume), values["step"])
                loaded = True
            case "step":
                total = forward_backward(engine, command.micro_batches, config.loss)
                assert total is not None  # hand_out() sends no empty step
                team.sum(total)
            case "optimize":
                engine.optimizer_step(skip=values["skip"])
            case "export":
                for _ in engine.export_weights():
                    pass
            case "save":
                _save_part(engine, team, Path(values["directory"]))
            case "poll":
                team.stopping(stop)
            case "end":
                team.leave()
                if loaded:  # rank 0 may end before it has found what to load
                    engine.close()
                return int(values["code"])
            case unknown:
                raise RuntimeError(f"rank 0 sent the command {unknown!r}, which this version does not know")


def forward_backward(engine: TrainerEngine, micro_batches: Sequence[MicroBatch], loss: LossConfig) -> Tensor | None:
    """Add up the gradients of some micro-batches; returns their summed ``float64[8]`` of :class:`LossSums`."""
    total: Tensor | None = None
    for index, batch in enumerate(micro_batches):
        stats = engine.forward(batch)
        device = stats.logprobs.device

        def there(array: object, device: torch.device = device) -> Tensor:
            return torch.as_tensor(array, device=device)

        value, sums = policy_loss(
            stats.logprobs,
            there(batch.old_logprobs),
            there(batch.advantages),
            there(batch.weights),
            loss,
            entropy=stats.entropy,
            entropy_sample=stats.entropy_sample,
        )
        engine.backward(value, last=index == len(micro_batches) - 1)
        total = sums if total is None else total + sums
    return total


def _save_part(engine: TrainerEngine, team: Team, directory: Path) -> None:
    try:
        team.attempt(lambda: engine.save(directory))
    except Exception as error:  # rank 0 decides whether the run goes on
        logger.error("checkpoint %s: %s", directory, error)
