"""Programs of several ranks as forks of one process: importing torch and an engine takes longer than most tests.

What torchrun itself does is tested with whole trainers (test_process.py, test_faults.py, tests/integration/runs).

``python -m support.forked_ranks`` is the process: each line that it reads is the JSON of a :class:`Launch`, answered by
one line, the exit codes in the order in which the ranks have ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from support.ports import free_port
from support.torchrun import end_with, rank_environment

IMPORTED = (
    "deepspeed",
    "inflight_runtime.trainer.engines.deepspeed",
    "inflight_runtime.trainer.engines.fsdp2",
    "inflight_runtime.trainer.engines.single",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
OTHERS_END_S = 2.0
"""After one rank has failed; what the others say is of use, too."""
POLL_S = 0.02


@dataclass(frozen=True)
class Launch:
    """One program.

    Attributes:
        module: has a ``main`` that takes its arguments from ``sys.argv``.
        arguments: these.
        ranks: how many.
        log: file for what all of them print.
        deadline_s: then they are killed.
    """

    module: str
    arguments: Sequence[str]
    ranks: int
    log: str
    deadline_s: float


class ForkedRanks:
    """The tests' end of the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, launch: Launch) -> tuple[int, str]:
        """The exit code of the rank that failed first, else 0, and what was printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(launch)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        output = Path(launch.log).read_text(errors="replace")
        assert answer, f"the process that forks the ranks is gone\n{output}"
        return next((code for code in json.loads(answer) if code), 0), output


@contextlib.contextmanager
def forked_ranks() -> Iterator[ForkedRanks]:
    """The process; none of its ranks is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=rank_environment(),
    )
    try:
        yield ForkedRanks(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def fork(launch: Launch, rank: int, port: int) -> int:
    pid = os.fork()
    if pid == 0:
        log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(launch.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        sys.argv = [launch.module, *launch.arguments]
        end_with(importlib.import_module(launch.module).main)
    return pid


def codes(launch: Launch, pids: list[int]) -> list[int]:
    """Exit codes in the order in which they end; one that fails, or the deadline, ends the others."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + launch.deadline_s
    while len(ended) < len(pids):
        for pid in pids:
            if pid not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(status[1])
                if ended[pid] != 0:
                    deadline = min(deadline, time.monotonic() + OTHERS_END_S)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in ended:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return list(ended.values())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        launch, port = Launch(**json.loads(line)), free_port()
        pids = [fork(launch, rank, port) for rank in range(launch.ranks)]
        answers.write(json.dumps(codes(launch, pids)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
