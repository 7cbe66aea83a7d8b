"""A cluster for a person to play with, until Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from .binaries import Binaries
from .cluster import Cluster
from .errors import ClusterError

LOOK_EVERY_S = 1.0
Running = TypeVar("Running", bound=Cluster)


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def stay_up(
    what: str,
    build: Callable[[], Binaries],
    start: Callable[[Binaries], AbstractContextManager[Running]],
    when_up: Callable[[Running], None],
    *,
    build_only: bool,
) -> int:
    """Build and start a cluster and leave it up until Ctrl-C; 1 when it cannot start or a component ends.

    Args:
        what: its name for people.
        build: brings the programs.
        start: starts the cluster, and ends it.
        when_up: called before the person is told.
        build_only: start nothing.
    """
    # A shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        binaries = build()
        if build_only:
            return 0
        began = time.monotonic()
        with start(binaries) as cluster:
            when_up(cluster)
            tell(what, cluster, time.monotonic() - began)
            while True:
                cluster.processes.check()
                time.sleep(LOOK_EVERY_S)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


def tell(what: str, cluster: Cluster, seconds: float) -> None:
    """Say what is there and how to use it."""
    program = "kubectl" if shutil.which("kubectl") else str(cluster.kubectl.program)
    say(f"{what} up in {seconds:.1f} s (process {os.getpid()})")
    say(f"  export KUBECONFIG={cluster.kubeconfig}")
    say(f"  {program} apply -k examples/sort-letters")
    say(f"  logs and audit log: {cluster.state}")
    if cluster.refused_crds:
        say(f"the API server refused crds/:\n{cluster.refused_crds}")
    say("Ctrl-C ends it and removes all of it")
