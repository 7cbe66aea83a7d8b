"""Builds the images of the Dockerfile, and writes each as one file that containerd imports."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from . import base, machine, store
from .archive import write_archive

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("operator", "runtime")
BUILD_DEADLINE_S = 1800.0
LONG_BUILD_S = 60.0
"""A build that took longer has made a layer of gigabytes anew: the one that it replaces goes."""


@dataclass(frozen=True)
class Image:
    """A built image.

    Attributes:
        target: of the Dockerfile.
        name: under which it is known once imported; the one that manifests and the operator's defaults ask for.
        identity: digest of its configuration.
        archive: the image as one file, for ``ctr images import``.
        size: of all its layers, uncompressed, in bytes.
    """

    target: str
    name: str
    identity: str
    archive: Path
    size: int


def build_image(target: str, *, present: Collection[str] = (), shown: bool = True) -> Image:
    """Build an image from the working tree: minutes the first time, then seconds.

    Args:
        target: of the Dockerfile.
        present: digests of blobs that the node has (``ctr content ls -q``): the archive is written without them.
        shown: whether buildah's words go to standard error as they come.

    Raises:
        ClusterError: it cannot be built; the message, or the words before it, say why.
    """
    store.ensure_tools()
    name = f"docker.io/library/inflight-{target}:{version()}"
    with store.one_at_a_time():
        parent = base.ensure_base()
        started = time.monotonic()
        identity = _build(target, name, parent, shown)
        took = time.monotonic() - started
        store.say(f"{name} built in {took:.1f} s")
        if took > LONG_BUILD_S:
            store.buildah("rmi", "--prune")
        return Image(target, name, identity, *write_archive(target, name, identity, present))


def version() -> str:
    """The project's version."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def describe(image: Image) -> dict[str, object]:
    """An image's configuration and the size of each of its layers, as buildah tells them."""
    told: dict[str, object] = json.loads(store.buildah("inspect", "--type", "image", image.identity))
    return told


def _build(target: str, name: str, parent: str, shown: bool) -> str:
    told = store.directory() / f"{target}.id"
    with machine.mounts() as settings:
        store.buildah(
            *("build", "--isolation", "chroot", "--network", "host", "--pull-never", "--layers", "--format", "docker"),
            *settings,
            *("--build-arg", f"BASE_IMAGE={parent}", "--build-arg", f"VERSION={version()}"),
            *("--target", target, "--tag", name, "--iidfile", told, ROOT),
            deadline_s=BUILD_DEADLINE_S,
            shown=shown,
        )
    return told.read_text().strip().removeprefix("sha256:")
