"""kubectl, as a function: with a deadline, its own cache, and errors that hold its words."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inflight_runtime.api.loading import dump_yaml

from .errors import ClusterError

DEADLINE_S = 30.0


class KubectlError(ClusterError):
    """A command was refused.

    Attributes:
        stderr: what kubectl said.
    """

    def __init__(self, command: str, code: int, stderr: str) -> None:
        super().__init__(f"{command} ended with {code}:\n{stderr.strip()}")
        self.stderr = stderr


class Kubectl:
    """Runs kubectl with one kubeconfig.

    Args:
        program: the executable.
        kubeconfig: whom it acts as.
        home: where it may keep its cache of what the server offers.
    """

    def __init__(self, program: Path, kubeconfig: Path, home: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig
        self._home = home

    def __call__(self, *arguments: str, stdin: str | None = None, deadline_s: float = DEADLINE_S) -> str:
        """Run one command and return what it printed.

        Raises:
            KubectlError: it ended with an error.
            ClusterError: it did not end in time.
        """
        shown = " ".join(["kubectl", *arguments])
        try:
            done = subprocess.run(
                [str(self.program), *arguments],
                input=stdin,
                env=os.environ | {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self._home)},
                capture_output=True,
                text=True,
                timeout=deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shown}: not done within {deadline_s:g} s") from error
        if done.returncode != 0:
            raise KubectlError(shown, done.returncode, done.stderr)
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """``kubectl get ... -o json``, decoded."""
        return json.loads(self("get", *arguments, "-o", "json"))

    def create(self, documents: Iterable[Mapping[str, Any]], *arguments: str) -> str:
        """``kubectl create -f -`` of these objects."""
        return self("create", *arguments, "-f", "-", stdin="---\n".join(map(dump_yaml, documents)))

    def acting_as(self, kubeconfig: Path) -> Kubectl:
        """The same program with another kubeconfig."""
        return Kubectl(self.program, kubeconfig, self._home)
