"""How the programs come into the cache, with a `go` that only pretends to compile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control_plane.cluster import ClusterError, binaries, ensure_binaries

FAKE_GO = """#!/bin/sh
set -eu
echo "$*" >> "$FAKE_GO_LOG"
if [ -n "${FAKE_GO_FAILS:-}" ]; then echo "no such module" >&2; exit 1; fi
if [ "$1" = list ]; then echo "$FAKE_GO_SOURCES/$5"; exit; fi
output="$5"; shift 5
case "$output" in
  */) for package in "$@"; do echo made > "$output${package##*/}"; done ;;
  *) echo made > "$output" ;;
esac
"""


@pytest.fixture
def go_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH with nothing but a pretended `go`; where that writes down its calls."""
    path = tmp_path / "bin"
    path.mkdir()
    (path / "go").write_text(FAKE_GO)
    (path / "go").chmod(0o755)
    for module, patterns in [entry for one in binaries.SETS.values() for entry in one.manifests.items()]:
        for pattern in patterns:
            file = tmp_path / "sources" / module / pattern.replace("*", "some")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("kind: Something\n")
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("INFLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_GO_LOG", str(tmp_path / "go.log"))
    monkeypatch.setenv("FAKE_GO_SOURCES", str(tmp_path / "sources"))
    return tmp_path / "go.log"


def builds(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("build ")]


def test_everything_is_built_once_kubectl_too_when_there_is_none(go_log: Path) -> None:
    found = ensure_binaries()
    assert {"etcd", "kube-apiserver", "jobset", "kwok", "kubectl"} <= set(found.programs)
    assert all(program.read_text() == "made\n" for program in found.programs.values())
    assert found.jobset_webhooks.is_file()
    assert len(found.jobset_crds) == 1
    assert len(found.kwok_stages) == 4
    assert len(builds(go_log)) == 4
    assert ensure_binaries() == found
    assert len(builds(go_log)) == 4


def test_two_that_build_at_once_build_once(go_log: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_binaries(), range(2))
    assert first == second
    assert len(builds(go_log)) == 4


def test_a_failed_build_tells_why_and_leaves_nothing(go_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GO_FAILS", "1")
    with pytest.raises(ClusterError, match="no such module"):
        ensure_binaries()
    assert [path.suffix for path in binaries.cache_directory().iterdir()] == [".lock"]
    monkeypatch.delenv("FAKE_GO_FAILS")
    assert ensure_binaries().programs["etcd"].is_file()


def test_without_go_the_message_says_how_to_get_it(go_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(go_log.parent / "nothing"))
    with pytest.raises(ClusterError, match=r"no `go` on the PATH: install Go 1\.26 or newer \(https://go\.dev"):
        ensure_binaries()
