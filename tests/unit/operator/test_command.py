"""The operator's command line."""

from __future__ import annotations

import subprocess
import sys

from inflight_operator.settings import Settings


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inflight_operator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={})


def test_help_tells_every_setting() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in Settings.model_fields:
        assert f"INFLIGHT_{name.upper()}" in done.stdout


def test_an_argument_that_is_none_is_refused() -> None:
    done = run("--namespace=team")
    assert done.returncode == 2
    assert "unrecognized arguments: --namespace=team" in done.stderr
