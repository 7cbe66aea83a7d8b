"""Writes ``manifests/`` of the working directory."""

from __future__ import annotations

import sys

from inflight_operator.install import DIRECTORY, render_files


def main() -> int:
    """Write every file; one that is not made any more is left, and a test names it."""
    for path, text in render_files().items():
        target = DIRECTORY / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        sys.stdout.write(f"wrote {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
