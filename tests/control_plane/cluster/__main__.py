"""Leaves a control plane up for a person to play with, until Ctrl-C: ``make control-plane``."""

from __future__ import annotations

import argparse
import sys

from .binaries import Binaries, ensure_binaries, ensure_program
from .cluster import running_cluster
from .console import stay_up


def main() -> int:
    """Run until Ctrl-C; 1 when it cannot start or a component ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true", help="build what is missing from the cache, start nothing")
    parser.add_argument("--also", action="append", default=[], metavar="PROGRAM", help="build this one as well (helm)")
    arguments = parser.parse_args()

    def build() -> Binaries:
        for program in arguments.also:
            ensure_program(program)
        return ensure_binaries()

    return stay_up("control plane", build, running_cluster, lambda _: None, build_only=arguments.build_only)


if __name__ == "__main__":
    sys.exit(main())
