"""``inflight`` with stub roles, and without the checks that would ask for a real model and environment."""

import sys
from pathlib import Path

from inflight_runtime import cli
from inflight_runtime.local import launch, prepare

STUB = Path(__file__).with_name("stub_roles.py")


def command(self: launch.Launcher, module: str, name: str) -> list[str]:
    config = self._directory.config / f"{name}.json"
    return [sys.executable, "-S", str(STUB), module, "--config", str(config)]


launch.Launcher._command = command  # type: ignore[method-assign]
prepare.check_local_run = lambda *_: []  # type: ignore[assignment]
cli.main()
