"""One file for ``ctr images import``: an OCI archive, uncompressed, since it is read on this machine and nowhere else.

Its blobs carry their digests in their names, so that containerd passes over those it has. Layers that a node is known
to have need not be in it at all: then a change of code costs seconds, not the gigabytes below it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from control_plane.cluster import ClusterError

from . import store

ARCHIVE_DEADLINE_S = 600.0
ARCHIVES_KEPT = 2
"""Of each image: one that another clone may just be importing is not taken away."""
TAG = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"


def write_archive(target: str, name: str, identity: str, present: Collection[str]) -> tuple[Path, int]:
    """Write the archive of an image, unless it is there; return it and the size of the image's layers.

    Args:
        target: of the Dockerfile.
        name: of the image, once imported.
        identity: digest of its configuration.
        present: digests of blobs to leave out.
    """
    started = time.monotonic()
    layout = store.directory() / "layout"
    # By skopeo: it leaves layers uncompressed, and alone those that lie there; buildah compresses all each time.
    source = f"containers-storage:[overlay@{store.directory() / 'storage'}+{store.directory() / 'run'}]@{identity}"
    command = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-oci-accept-uncompressed-layers"]
    store.run([*command, source, f"oci:{layout}:{target}"], deadline_s=ARCHIVE_DEADLINE_S)
    index = json.loads((layout / "index.json").read_text())
    entry = _entry(index, target)
    size = sum(layer["size"] for layer in _manifest(layout, entry)["layers"])
    blobs = [blob for blob in _blobs(layout, entry) if f"sha256:{blob.name}" not in present]
    folder = store.directory() / "archives"
    folder.mkdir(exist_ok=True)
    content = hashlib.sha256("".join(blob.name for blob in blobs).encode()).hexdigest()[:12]
    archive = folder / f"{target}-{content}.oci.tar"
    if archive.exists():
        archive.touch()
        return archive, size
    partial = archive.with_suffix(".partial")
    try:
        _write(partial, layout, {**entry, "annotations": {CONTAINERD_NAME: name}}, blobs)
        partial.rename(archive)
    finally:
        partial.unlink(missing_ok=True)
    _sweep(layout, index)
    for old in sorted(folder.glob(f"{target}-*"), key=lambda path: path.stat().st_mtime)[:-ARCHIVES_KEPT]:
        old.unlink()
    store.say(f"{archive} ({archive.stat().st_size / 1e6:.0f} MB) written in {time.monotonic() - started:.1f} s")
    return archive, size


def _entry(index: dict[str, Any], target: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        entry for entry in index["manifests"] if entry.get("annotations", {}).get(TAG) == target
    ]
    if len(found) != 1:
        raise ClusterError(f"buildah wrote {len(found)} images named {target}")
    return found[0]


def _write(archive: Path, layout: Path, entry: dict[str, Any], blobs: list[Path]) -> None:
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as written:
        for file, content in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), ("index.json", index)):
            encoded = json.dumps(content).encode()
            member = tarfile.TarInfo(file)
            member.size = len(encoded)
            written.addfile(member, io.BytesIO(encoded))
        for blob in blobs:
            member = tarfile.TarInfo(str(blob.relative_to(layout)))
            member.size = blob.stat().st_size
            with blob.open("rb") as content_file:
                written.addfile(member, content_file)


def _manifest(layout: Path, entry: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_blob(layout, entry).read_text())
    return content


def _blobs(layout: Path, entry: dict[str, Any]) -> list[Path]:
    """The files of an image: manifest, configuration, layers."""
    content = _manifest(layout, entry)
    return [_blob(layout, entry), *(_blob(layout, part) for part in (content["config"], *content["layers"]))]


def _blob(layout: Path, descriptor: dict[str, Any]) -> Path:
    return layout / "blobs" / str(descriptor["digest"]).replace(":", "/")


def _sweep(layout: Path, index: dict[str, Any]) -> None:
    """Forget images that another one has taken the tag of, and remove the blobs that no image has any more."""
    tagged = [entry for entry in index["manifests"] if TAG in entry.get("annotations", {})]
    (layout / "index.json").write_text(json.dumps({**index, "manifests": tagged}))
    wanted = {blob for entry in tagged for blob in _blobs(layout, entry)}
    for blob in (layout / "blobs").glob("*/*"):
        if blob not in wanted:
            blob.unlink()
