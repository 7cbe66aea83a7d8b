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

from control_plane.cluster import ClusterError, eventually

from .components import PAUSE_IMAGE

NAMESPACE = "k8s.io"
"""Where the kubelet's part of containerd looks for images and keeps containers."""
BY_IDENTITY = "sha256:"
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
        """Import an archive (docker or OCI) under the names that it gives its images, unless they are there already.

        Raises:
            ClusterError: containerd cannot read it, or took too long.
        """
        identities = identities_of(archive)
        if identities and self._has(identities):
            return
        # The kubelet's half of containerd learns of new names only, not of other contents under an old one.
        if known := sorted(identities.keys() & self._images().keys()):
            self._ctr("images", "remove", *known)
        self._ctr("images", "import", str(archive), deadline_s=IMPORT_DEADLINE_S)
        eventually(f"pods can use the images of {archive.name}", lambda: self._has(identities), KNOWN_DEADLINE_S)
        self._remove_old()

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

    def _has(self, identities: Mapping[str, str]) -> bool:
        """Whether the kubelet's half knows each name for the image of this identity."""
        images = self._images()
        return all(
            name in images and images.get(f"{BY_IDENTITY}{identity}") == images[name]
            for name, identity in identities.items()
        )

    def _remove_old(self) -> None:
        """Remove images without a name: each goes by its identity as well, which would keep older builds for good."""
        images = self._images()
        named = {digest for name, digest in images.items() if not name.startswith(BY_IDENTITY)}
        if old := [name for name, digest in images.items() if name.startswith(BY_IDENTITY) and digest not in named]:
            self._ctr("images", "remove", *old)

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


def identities_of(archive: Path) -> dict[str, str]:
    """The digest of each image's configuration by name; empty when this is not a docker archive."""
    with tarfile.open(archive) as members:
        try:
            manifest = members.extractfile("manifest.json")
        except KeyError:
            return {}
        assert manifest is not None
        return {
            name: Path(image["Config"]).name.removesuffix(".json")
            for image in json.load(manifest)
            for name in image["RepoTags"] or ()
        }


def write_archive(path: Path, name: str, programs: Mapping[str, bytes], entrypoint: list[str]) -> None:
    """Write an image that holds nothing but a few static programs, as ``docker save`` would."""
    layer = _tar({program: (content, 0o755) for program, content in programs.items()})
    configuration = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    config = json.dumps(configuration).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    members = {
        config_name: config,
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    path.write_bytes(_tar({member: (content, 0o644) for member, content in members.items()}))


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
