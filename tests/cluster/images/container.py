"""Runs a command in an image as a pod of ours would: not as root, nothing writable but /tmp, nothing of this machine.

No container runtime is needed: a mount namespace, a process namespace and chroot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import store
from .build import Image, describe

USER = "10001:10001"
RUN_DEADLINE_S = 120.0
SET_UP = r"""
set -e
root=$1; user=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
  mount --bind "$1" "$root$2"
  mount -o remount,bind,ro "$root$2"
  shift 2
done
shift
mount -o remount,bind,ro "$root"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -o remount,bind,ro "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
printf '127.0.0.1 localhost %s\n' "$(hostname)" >"$root/dev/hosts"
mount --bind "$root/dev/hosts" "$root/etc/hosts"
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
exec chroot --userspec="$user" --groups= "$root" "$@"
"""
"""Mounts come in pairs of arguments, read-only, up to ``--``; then the command."""


class Container:
    """An image's file system, and what its configuration says.

    Attributes:
        root: where the file system lies.
        config: the image's OCI configuration.
    """

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root = root
        self.config = config

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the image sets."""
        return dict(entry.split("=", 1) for entry in self.config["Env"])

    def run(
        self,
        *command: str,
        mounts: Mapping[Path, str] | None = None,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = RUN_DEADLINE_S,
    ) -> str:
        """Run a command and return what it prints.

        Args:
            command: the program is looked for as in the image.
            mounts: what else is seen, read-only, by directory of this machine; the directory must be in the image.
            environment: variables besides the image's.
            deadline_s: seconds that it may take.

        Raises:
            ClusterError: it failed, with its last words, or took too long.
        """
        variables = self.environment | (environment or {})
        pairs = [str(part) for pair in (mounts or {}).items() for part in pair]
        words = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command]
        unshared = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", SET_UP, "sh"]
        return store.run([*unshared, str(self.root), USER, *pairs, "--", *words], deadline_s=deadline_s)


@contextlib.contextmanager
def container(image: Image) -> Iterator[Container]:
    """An image's file system for as long as it is needed."""
    config = describe(image)["Docker"]["config"]
    name = store.container_name()
    store.buildah("from", "--pull-never", "--name", name, image.identity)
    try:
        yield Container(Path(store.buildah("mount", name).strip()), config)
    finally:
        store.buildah("rm", name)
