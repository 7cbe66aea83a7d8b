"""Writes ``manifests/`` and the generated part of ``charts/inflight/`` of the working directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inflight_operator.install import CHART, DIRECTORY, render_chart, render_files
from inflight_operator.install.chart import README, with_table


def main() -> int:
    """Write every file; one that is not made any more is left, and a test names it."""
    argparse.ArgumentParser(prog="python -m inflight_operator.install", description=__doc__).parse_args()
    for path, text in render_files().items():
        _write(DIRECTORY / path, text)
    for path, text in render_chart().items():
        _write(CHART / path, text)
    readme = CHART / README
    if readme.is_file():
        _write(readme, with_table(readme.read_text()))
    return 0


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    sys.stdout.write(f"wrote {target}\n")


if __name__ == "__main__":
    sys.exit(main())
