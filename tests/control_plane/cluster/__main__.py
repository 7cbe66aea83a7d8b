"""Leaves a control plane up for a person to play with, until Ctrl-C: ``make control-plane``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time

from .binaries import ensure_binaries, ensure_program
from .cluster import Cluster, running_cluster
from .errors import ClusterError

LOOK_EVERY_S = 1.0


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def tell(cluster: Cluster, seconds: float) -> None:
    """Say what is there and how to use it."""
    program = "kubectl" if shutil.which("kubectl") else str(cluster.kubectl.program)
    say(f"control plane up in {seconds:.1f} s (process {os.getpid()})")
    say(f"  export KUBECONFIG={cluster.kubeconfig}")
    say(f"  {program} apply -f examples/sort-letters/job.yaml")
    say(f"  logs and audit log: {cluster.state}")
    if cluster.refused_crds:
        say(f"the API server refused crds/:\n{cluster.refused_crds}")
    say("Ctrl-C ends it and removes all of it")


def main() -> int:
    """Run until Ctrl-C; 1 when it cannot start or a component ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true", help="build what is missing from the cache, start nothing")
    parser.add_argument("--also", action="append", default=[], metavar="PROGRAM", help="build this one as well (helm)")
    arguments = parser.parse_args()
    # A shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        binaries = ensure_binaries()
        for program in arguments.also:
            ensure_program(program)
        if arguments.build_only:
            return 0
        began = time.monotonic()
        with running_cluster(binaries) as cluster:
            tell(cluster, time.monotonic() - began)
            while True:
                cluster.processes.check()
                time.sleep(LOOK_EVERY_S)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
