"""What becomes of a machine without the programs that the cluster suite needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import packages
from cluster.node import machine
from control_plane.cluster import ClusterError

APT = """#!/bin/sh
echo "$*" >> "$APT_LOG"
case "$*" in *install*) [ -e "$APT_LOG.updated" ] || exit 100; echo > "$APT_LOG.program";; esac
case "$*" in *update*) echo > "$APT_LOG.updated";; esac
"""


@pytest.fixture
def apt_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `apt-get` that only pretends, and knows no package before an update; where it writes down its calls."""
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(APT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("APT_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "log"


def test_what_is_missing_is_installed(apt_log: Path) -> None:
    packages.ensure_programs({f"{apt_log}.program": "some-package", "sh": "dash"})
    calls = [line.partition("Timeout=300 ")[2] for line in apt_log.read_text().splitlines()]
    install = "install --yes --no-install-recommends some-package"
    assert calls == [install, "update", install]


def test_nothing_is_installed_when_all_is_there(apt_log: Path) -> None:
    packages.ensure_programs({"sh": "dash", "/bin/sh": "dash"})
    assert not apt_log.exists()


def test_who_is_not_root_is_told_the_command(apt_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="as root: apt-get install --no-install-recommends some-package"):
        packages.ensure_programs({"/nowhere": "some-package"})
    assert not apt_log.exists()


def test_a_system_without_apt_is_told_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match="install what the Debian packages some-package hold"):
        packages.ensure_programs({"/nowhere": "some-package"})


def test_a_node_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="a node needs root"):
        machine.check()
