"""Images on the node: those of tar archives, and the one of the process that holds a pod together."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from control_plane.cluster import ClusterError

from .components import PAUSE_IMAGE

NAMESPACE = "k8s.io"
"""Where the kubelet's part of containerd looks for images."""
IMPORT_DEADLINE_S = 540.0
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Images:
    """The images that pods of the node can use; none is ever pulled.

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
        """Import an archive (docker or OCI) under the names that it gives its images.

        Raises:
            ClusterError: containerd cannot read it, or took too long.
        """
        self._ctr("--namespace", NAMESPACE, "images", "import", str(archive), deadline_s=IMPORT_DEADLINE_S)

    def names(self) -> set[str]:
        """The names of all images."""
        return set(self._ctr("--namespace", NAMESPACE, "images", "list", "-q").split())

    def add_pause(self, program: Path, scratch: Path) -> None:
        """Make the image of the pause program, and import it."""
        archive = scratch / "pause.tar"
        write_archive(archive, PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])
        self.add(archive)

    def _ctr(self, *arguments: str, deadline_s: float = 30.0) -> str:
        command = ["ctr", "--address", str(self._socket), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{' '.join(command)}: not done within {deadline_s:g} s") from error
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.strip()}")
        return done.stdout


def write_archive(path: Path, name: str, programs: Mapping[str, bytes], entrypoint: list[str]) -> None:
    """Write an image that holds nothing but a few static programs, as ``docker save`` would."""
    layer = _tar({program: (content, 0o755) for program, content in programs.items()})
    configuration = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    members = {
        "config.json": json.dumps(configuration).encode(),
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
