"""Image archives: the one that is written for pods, and what is read from others."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from cluster.node.images import identities_of, write_archive


def test_a_written_archive_holds_its_program_under_its_name(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    write_archive(archive, "localhost/some:1", {"some": b"program"}, ["/some"])
    with tarfile.open(archive) as members:
        members.extractall(tmp_path, filter="data")
    (image,) = json.loads((tmp_path / "manifest.json").read_bytes())
    config = (tmp_path / image["Config"]).read_bytes()
    (layer,) = image["Layers"]
    with tarfile.open(tmp_path / layer) as files:
        (program,) = files.getmembers()
    assert (program.name, program.mode, program.size) == ("some", 0o755, 7)
    assert json.loads(config)["config"]["Entrypoint"] == ["/some"]
    assert identities_of(archive) == {"localhost/some:1": hashlib.sha256(config).hexdigest()}


def test_another_kind_of_archive_has_no_identities(tmp_path: Path) -> None:
    archive = tmp_path / "oci.tar"
    (tmp_path / "index.json").write_text("{}")
    with tarfile.open(archive, "w") as members:
        members.add(tmp_path / "index.json", "index.json")
    assert identities_of(archive) == {}
