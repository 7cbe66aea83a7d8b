"""helm, as a function: with a deadline, directories of its own, and errors that hold its words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from control_plane.cluster import ClusterError

DEADLINE_S = 60.0


class HelmError(ClusterError):
    """A command was refused; the message holds what helm said."""


class Helm:
    """Runs helm with one kubeconfig.

    Args:
        program: the executable.
        kubeconfig: whom it acts as.
        home: where it may keep what it keeps.
    """

    def __init__(self, program: Path, kubeconfig: Path, home: Path) -> None:
        self._program = program
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            **{f"HELM_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")},
        }

    def __call__(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run one command and return what it printed.

        Raises:
            HelmError: it ended with an error.
            ClusterError: it did not end in time.
        """
        shown = " ".join(["helm", *arguments])
        try:
            done = subprocess.run(
                [str(self._program), *arguments],
                env=self._environment,
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shown}: not done within {DEADLINE_S:g} s") from error
        if done.returncode != 0:
            raise HelmError(f"{shown} ended with {done.returncode}:\n{done.stderr.strip()}")
        return done.stdout

    def template(self, chart: Path, namespace: str, *arguments: str) -> list[dict[str, Any]]:
        """The objects that a chart renders."""
        text = self("template", "inflight", str(chart), "--namespace", namespace, *arguments)
        return [document for document in yaml.safe_load_all(text) if document]
