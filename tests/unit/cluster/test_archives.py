"""Image archives: the one that is written for pods, and what is read from others."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from cluster.node.images import digests_of, write_archive
from control_plane.cluster import ClusterError


def test_a_written_archive_holds_its_program_under_its_name(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    write_archive(archive, "localhost/some:1", {"some": b"program"}, ["/some"])
    with tarfile.open(archive) as members:
        members.extractall(tmp_path, filter="data")

    def blob(described: dict[str, object]) -> Path:
        path = tmp_path / "blobs" / str(described["digest"]).replace(":", "/")
        assert path.name == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_size == described["size"]
        return path

    (entry,) = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    manifest = json.loads(blob(entry).read_bytes())
    config = json.loads(blob(manifest["config"]).read_bytes())
    with tarfile.open(blob(manifest["layers"][0])) as files:
        (program,) = files.getmembers()
    assert (program.name, program.mode, program.size) == ("some", 0o755, 7)
    assert config["config"]["Entrypoint"] == ["/some"]
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert digests_of(archive) == {"localhost/some:1": entry["digest"]}


def test_a_docker_archive_has_no_digests(tmp_path: Path) -> None:
    archive = tmp_path / "docker.tar"
    (tmp_path / "manifest.json").write_text("[]")
    with tarfile.open(archive, "w") as members:
        members.add(tmp_path / "manifest.json", "manifest.json")
    assert digests_of(archive) == {}


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no image archive"):
        digests_of(tmp_path / "nothing.tar")
