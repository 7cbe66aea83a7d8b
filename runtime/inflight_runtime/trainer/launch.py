"""``python -m inflight_runtime.trainer.launch --config FILE``: the ranks of one node, under torch's elastic agent.

All other options, and the ``PET_*`` variables, are torchrun's own. Unlike torchrun, which makes a 1 of whatever its
ranks end with, it ends with the exit code of the rank that failed first (see the trainer's :mod:`.__main__`): whoever
restarts a trainer must know a bad configuration, which no restart mends, from a crash. After a signal the ranks have
``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` seconds for their checkpoint, and their code is the launcher's, too; a signal that
comes before there are ranks, while this node waits for the others for instance, ends it at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Final

from inflight_runtime.garbage import loading_modules
from inflight_runtime.trainer.signals import EarlyEnd

MODULE: Final = "inflight_runtime.trainer"
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> int:
    """Run the trainer's ranks of this node; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}",
        description="Run the trainer's ranks of one node. All other options are torchrun's.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="rendered trainer config (JSON)")
    arguments, options = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    early_end = EarlyEnd()
    early_end.install()
    with loading_modules():  # torch takes seconds, in which a signal may come
        from inflight_runtime.trainer.agent import launch  # noqa: PLC0415

    return launch([*options, "--module", MODULE, "--config", str(arguments.config)], early_end)


if __name__ == "__main__":
    sys.exit(main())
