"""What goes wrong with a test cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """The test cluster cannot be built, started or used; the message says why and shows the end of the log."""
