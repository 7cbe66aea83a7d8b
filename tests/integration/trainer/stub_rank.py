"""A rank reduced to how it ends: ``stub_rank.py DIRECTORY BEHAVIOURS``, a JSON of one behaviour for each rank.

``exit N`` ends at once, ``tell N`` with a reason as well, ``die`` by SIGKILL; ``wait`` and ``save`` wait for a signal
and end as a trainer does, ``save`` a moment later; ``late`` then ends like ``tell 2``; ``ignore`` does not end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from inflight_runtime.trainer.failure import tell_launcher

DIRECTORY = Path(sys.argv[1])
RANK = os.environ["RANK"]
REASON = "cannot train: the moon is full"
WORD, _, NUMBER = json.loads(sys.argv[2])[int(RANK)].partition(" ")


def stopped(signum: int, _: object) -> None:
    if WORD == "ignore":
        return
    if WORD == "late":
        tell_launcher(REASON)
        os._exit(2)
    if WORD == "save":
        time.sleep(1)
        (DIRECTORY / f"saved-{RANK}").touch()
    os._exit(128 + signum)


signal.signal(signal.SIGTERM, stopped)
signal.signal(signal.SIGINT, stopped)
world = (os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], os.environ["GROUP_RANK"])
(DIRECTORY / f"up-{RANK}").write_text(json.dumps([os.getpid(), *world]))
others = [DIRECTORY / f"up-{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
deadline = time.monotonic() + 30
while not all(other.exists() for other in others) and time.monotonic() < deadline:
    time.sleep(0.01)  # they are to end by what a test says, not by a signal that they cannot handle yet
if WORD == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif WORD == "tell":
    tell_launcher(REASON)
if NUMBER:
    sys.exit(int(NUMBER))
while True:
    time.sleep(0.05)
