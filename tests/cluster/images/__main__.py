"""``python -m cluster.images operator|runtime``: build an image and print where it is."""

from __future__ import annotations

import argparse
import sys

from control_plane.cluster import ClusterError

from .build import TARGETS, build_image


def main() -> int:
    """Build what is named, by default everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.images", description="Build the project's images.")
    parser.add_argument("targets", nargs="*", metavar="|".join(TARGETS), help="which ones; by default all")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no such image: {', '.join(sorted(unknown))}")
    try:
        for target in arguments.targets or TARGETS:
            image = build_image(target)
            print(image.name, image.archive)  # noqa: T201
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"images: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
