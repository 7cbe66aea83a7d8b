"""Images on the node: those of tar archives, and the one of the process that holds a pod together.

Containerd's store is kept from one node to the next, so that an image is unpacked once.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.cluster import ClusterError, eventually

from .components import PAUSE_IMAGE

NAMESPACE = "k8s.io"
"""Where the kubelet's part of containerd looks for images and keeps containers."""
BY_IDENTITY = "sha256:"
NAME = "io.containerd.image.name"
SEEN = "io.cri-containerd.image"
IMPORT_DEADLINE_S = 540.0
KNOWN_DEADLINE_S = 20.0
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Images:
    """What containerd has: the images that pods of the node can use. None is ever pulled.

    Args:
        socket: containerd's.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def answers(self) -> bool:
        """Whether containerd is up."""
        try:
            self._ctr("version")
        except ClusterError:
            return False
        return True

    def add(self, archive: Path) -> None:
        """Import an archive (OCI or docker) under the names that it gives its images, unless they are there already.

        An OCI archive may lack what :meth:`blobs` has.

        Raises:
            ClusterError: it is not there, containerd cannot read it, or it took too long.
        """
        digests = digests_of(archive)
        if digests and self._has(digests):
            return
        self._ctr("images", "import", str(archive), deadline_s=IMPORT_DEADLINE_S)
        # The kubelet's half looks into images without its mark, and a new one has taken over the old one's.
        for name in digests:
            self._ctr("images", "label", name, f"{SEEN}=")
        eventually(f"pods can use the images of {archive.name}", lambda: self._has(digests), KNOWN_DEADLINE_S)
        self._remove_old()

    def blobs(self) -> set[str]:
        """The digests of all that containerd has: layers, configurations, manifests."""
        return set(self._ctr("content", "list", "-q").split())

    def add_pause(self, program: Path, scratch: Path) -> None:
        """Make the image of the pause program, and import it."""
        archive = scratch / "pause.tar"
        write_archive(archive, PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])
        self.add(archive)

    def names(self) -> set[str]:
        """The names of all images."""
        return {name for name in self._images() if not name.startswith(BY_IDENTITY)}

    def forget_containers(self) -> None:
        """Remove the containers of an earlier node, which was ended without a word."""
        if old := self._ctr("containers", "list", "-q").split():
            self._ctr("containers", "delete", *old)

    def _has(self, digests: Mapping[str, str]) -> bool:
        """Whether the kubelet's half knows images of these digests, by name and by identity."""
        images = self._images()
        identified = {digest for name, digest in images.items() if name.startswith(BY_IDENTITY)}
        return all(images.get(name) == digest and digest in identified for name, digest in digests.items())

    def _remove_old(self) -> None:
        """Remove images without a name: each goes by its identity as well, which would keep older builds for good."""
        images = self._images()
        named = {digest for name, digest in images.items() if not name.startswith(BY_IDENTITY)}
        if old := [name for name, digest in images.items() if name.startswith(BY_IDENTITY) and digest not in named]:
            self._ctr("images", "remove", "--sync", *old)  # with their blobs, which :meth:`blobs` must not tell of

    def _images(self) -> dict[str, str]:
        """The digest of each image by name."""
        lines = self._ctr("images", "list").splitlines()[1:]  # after the header: name, type, digest, ...
        return {fields[0]: fields[2] for fields in map(str.split, lines)}

    def _ctr(self, *arguments: str, deadline_s: float = 30.0) -> str:
        command = ["ctr", "--address", str(self._socket), "--namespace", NAMESPACE, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(command)}: not done within {deadline_s:g} s") from error
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.strip()}")
        return done.stdout


def digests_of(archive: Path) -> dict[str, str]:
    """The digest of each image in an OCI archive by name; empty for a docker archive.

    Raises:
        ClusterError: there is no such archive.
    """
    try:
        with tarfile.open(archive) as members:
            index = members.extractfile("index.json")
            assert index is not None
            return {image["annotations"][NAME]: image["digest"] for image in json.load(index)["manifests"]}
    except KeyError:
        return {}
    except (OSError, tarfile.TarError) as error:
        raise ClusterError(f"no image archive: {archive} ({error})") from error


def write_archive(path: Path, name: str, programs: Mapping[str, bytes], entrypoint: list[str]) -> None:
    """Write an image that holds nothing but a few static programs, as an OCI archive."""
    layer = _tar({program: (content, 0o755) for program, content in programs.items()})
    configuration = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs: dict[str, tuple[bytes, int]] = {}

    def blob(kind: str, content: bytes) -> dict[str, Any]:
        blobs[f"blobs/{_digest(content).replace(':', '/')}"] = (content, 0o644)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": _digest(content), "size": len(content)}

    config = blob("config.v1+json", json.dumps(configuration).encode())
    manifest = {"schemaVersion": 2, "config": config, "layers": [blob("layer.v1.tar", layer)]}
    entry = blob("manifest.v1+json", json.dumps(manifest).encode()) | {"annotations": {NAME: name}}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    layout = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    path.write_bytes(_tar({"oci-layout": (layout, 0o644), "index.json": (index, 0o644)} | blobs))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
