"""Starts launchers as forks of itself: torch is imported once for all tests.

Each line of standard input is a JSON list of ``{"arguments": [...], "log": PATH}``; they run at the same time. Answers
with a line of their pids and, when all have ended, a line of their exit codes.
"""

import json
import logging
import os
import sys
from pathlib import Path

from inflight_runtime.trainer.agent import launch
from inflight_runtime.trainer.signals import EarlyEnd


def start(case: dict) -> int:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with Path(case["log"]).open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        early_end = EarlyEnd()
        early_end.install()
        code = launch(case["arguments"], early_end)
        sys.stderr.flush()
        os._exit(code)
    return pid


logging.basicConfig(level=logging.INFO)
for line in sys.stdin:
    pids = [start(case) for case in json.loads(line)]
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.stdout.write(json.dumps(codes) + "\n")
    sys.stdout.flush()
