"""Programs of several ranks, from both sides: a test that starts one, and the program itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

END_S = 60.0


def torchrun(ranks: int) -> list[str]:
    """The command that starts a program of ``ranks`` ranks, up to the program."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def rank_environment() -> dict[str, str]:
    """Of a program that finds what this process finds, and leaves cores to the other ranks."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_to_end(command: Sequence[str], deadline_s: float) -> tuple[int, str]:
    """Exit code and output; nothing of it is left afterwards.

    Raises:
        AssertionError: it was not done in time.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=rank_environment(),
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
        output, _ = process.communicate(timeout=END_S)
        raise AssertionError(f"not done in {deadline_s:g} s\n{output}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def end_with(main: Callable[[], None]) -> NoReturn:
    """Run a rank's ``main`` and end the process: 0, or 1 after any error."""
    code = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # distributed checkpoints leave threads that may abort a process at its end
