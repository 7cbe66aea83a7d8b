"""``python -m inflight_runtime``: the ``inflight`` command."""

from inflight_runtime.cli import main

main()
