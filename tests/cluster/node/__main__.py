"""Makes this machine a Kubernetes node for a person to play with, until Ctrl-C: ``make node``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from control_plane.cluster import ensure_binaries
from control_plane.cluster.binaries import REAL_NODE, Binaries
from control_plane.cluster.console import stay_up

from . import machine
from .node import Node, running_node


def main() -> int:
    """Run until Ctrl-C; 1 when it cannot start or a component ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true", help="get what is missing, start nothing")
    parser.add_argument("--image", action="append", default=[], type=Path, metavar="TAR", help="import this image")
    arguments = parser.parse_args()

    def build() -> Binaries:
        machine.check()
        return ensure_binaries(REAL_NODE)

    def import_images(node: Node) -> None:
        for archive in arguments.image:
            node.import_image(archive)

    return stay_up("node", build, running_node, import_images, build_only=arguments.build_only)


if __name__ == "__main__":
    sys.exit(main())
