"""The base that images are built on here: Debian's minimal system and its Python, for want of a public registry."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

from . import machine, store

SCHEME = "2"
"""Raised when this module makes the base in another way."""
PACKAGES = ("ca-certificates", "python3", "python3-venv")
PUBLIC_SOURCES = {
    machine.SUITE: "http://deb.debian.org/debian",
    f"{machine.SUITE}-updates": "http://deb.debian.org/debian",
    f"{machine.SUITE}-security": "http://deb.debian.org/debian-security",
}
DEBOOTSTRAP_DEADLINE_S = 540.0
UNWANTED = (
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian"),
    *("var/cache/apt", "var/lib/apt/lists", "var/log", "tmp"),
)
"""Emptied, as in the public slim images."""


def ensure_base() -> str:
    """Make the base image if it is not there (a minute or two), and return its name."""
    name = f"localhost/inflight-base:{_key()}"
    if store.buildah("images", "--quiet", "--filter", f"reference={name}").strip():
        return name
    started = time.monotonic()
    store.say("making the Debian base (a minute; once for all clones on this machine)")
    root = store.directory() / "base.partial"
    shutil.rmtree(root, ignore_errors=True)
    try:
        _make_system(root)
        container = store.buildah("from", "scratch").strip()
        store.buildah("add", "--quiet", container, root, "/")
        store.buildah("config", "--env", "LANG=C.UTF-8", "--cmd", '["python3"]', container)
        store.buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        store.buildah("commit", "--quiet", "--rm", container, name)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    store.say(f"made in {time.monotonic() - started:.0f} s")
    return name


def _key() -> str:
    parts = repr((SCHEME, PACKAGES, PUBLIC_SOURCES, UNWANTED, machine.MOUNT_POINTS))
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def _make_system(root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    store.run(
        [*command, machine.SUITE, str(root), machine.sites()[machine.SUITE]],
        deadline_s=DEBOOTSTRAP_DEADLINE_S,
        environment={"DPKG_FORCE": "unsafe-io"},  # no wait for the disk after each file
    )
    for name in UNWANTED:
        for path in (root / name).glob("*") if (root / name).is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (root / "etc/apt/sources.list").write_text(machine.sources(PUBLIC_SOURCES))
    for name in machine.MOUNT_POINTS:
        (root / name).touch()
    # debootstrap writes down the machine that it runs on; every container gets its own.
    for name in ("etc/resolv.conf", "etc/hostname", "etc/hosts"):
        (root / name).write_text("")
