"""What the operator knows of the cluster: the jobs and their children as they were last seen.

Kept up to date by watches, by the answers to our own writes, and by a look at everything from time to time, since a
watch that was cut off does not tell of what was deleted meanwhile. It may be behind the cluster; what is decided on it
is written so that it fails on a newer object (POST first, uids), and the next event puts it right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_runtime.api import KIND

Address = tuple[str, str]
"""Kind and name of a child."""
WATCHED: Final = (
    "ServiceAccount",
    "ConfigMap",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "PersistentVolumeClaim",
    "Service",
    "StatefulSet",
    "Deployment",
    "Job",
    "JobSet",
)
"""Kinds of children that are watched: all but Secrets, which the operator may not list."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def key_of(kind: str, manifest: Manifest) -> str:
    """``namespace/name`` of the job that an object is, or that its labels say it belongs to; empty for neither."""
    metadata = manifest.get("metadata") or {}
    name = metadata.get("name") if kind == KIND else (metadata.get("labels") or {}).get(names.JOB_LABEL)
    return f"{metadata.get('namespace', '')}/{name}" if name else ""


class Store:
    """Objects by job. An older version never replaces a newer one."""

    def __init__(self) -> None:
        # As text: a tenth of what the parsed objects would take.
        self._jobs: dict[str, tuple[int, bytes]] = {}
        self._children: dict[str, dict[Address, tuple[int, bytes]]] = {}

    def __iter__(self) -> Iterator[str]:
        """Keys of all jobs."""
        return iter(list(self._jobs))

    def __len__(self) -> int:
        return len(self._jobs)

    def job(self, key: str) -> Manifest | None:
        """A job, or ``None`` when there is none."""
        found = self._jobs.get(key)
        return None if found is None else json.loads(found[1])

    def children(self, key: str) -> dict[Address, Manifest]:
        """All children of a job, and the trainer's Jobs, which its JobSet owns."""
        return {address: json.loads(text) for address, (_, text) in self._children.get(key, {}).items()}

    def child(self, key: str, address: Address) -> Manifest | None:
        """One child of a job, or ``None`` when there is none."""
        found = self._children.get(key, {}).get(address)
        return None if found is None else json.loads(found[1])

    def put(self, kind: str, manifest: Manifest) -> str:
        """Take in an object.

        Args:
            kind: of the object (a watch does not always say).
            manifest: the whole object.

        Returns:
            Key of its job if this is news, else an empty string.
        """
        key = key_of(kind, manifest)
        if not key:
            return ""
        place, address = self._place(kind, key, manifest["metadata"]["name"])
        version = _version(manifest)
        known = place.get(address)
        if known is not None and version <= known[0]:
            return ""
        place[address] = (version, _compact(kind, manifest))
        return key

    def remove(self, kind: str, manifest: Manifest) -> str:
        """Drop an object that was deleted; key of its job, empty when nothing was known of it."""
        key = key_of(kind, manifest)
        if not key:
            return ""
        place, address = self._place(kind, key, manifest["metadata"]["name"])
        known = place.get(address)
        if known is None or known[0] > _version(manifest):
            return ""
        del place[address]
        if not self._children.get(key):
            self._children.pop(key, None)
        return key

    def forget(self, key: str) -> None:
        """Drop the children of a job that has gone."""
        self._children.pop(key, None)

    def compare(self, kind: str, listed: Iterable[Manifest], as_of: str) -> tuple[set[str], list[Manifest]]:
        """Drop what is not listed any more.

        Args:
            kind: of the objects.
            listed: all of them, their metadata at least.
            as_of: resource version of the list; what is newer is kept.

        Returns:
            Keys of the jobs that lost something, and the listed objects that are newer than what is known.
        """
        present: dict[tuple[str, Address], int] = {}
        newer: list[Manifest] = []
        for manifest in listed:
            key = key_of(kind, manifest)
            if not key:
                continue
            name = manifest["metadata"]["name"]
            version = _version(manifest)
            place, address = self._place(kind, key, name)
            present[key, (kind, name)] = version
            known = place.get(address)
            if known is None or known[0] < version:
                newer.append(manifest)
        lost: set[str] = set()
        limit = _number(as_of)
        for key, (found, version) in self._known(kind):
            if (key, found) not in present and version <= limit:
                lost.add(key)
                place, address = self._place(kind, key, found[1])
                del place[address]
        return lost, newer

    def _known(self, kind: str) -> list[tuple[str, tuple[Address, int]]]:
        if kind == KIND:
            return [(key, ((KIND, key.partition("/")[2]), version)) for key, (version, _) in self._jobs.items()]
        return [
            (key, (address, version))
            for key, children in self._children.items()
            for address, (version, _) in children.items()
            if address[0] == kind
        ]

    def _place(self, kind: str, key: str, name: str) -> tuple[dict[Any, tuple[int, bytes]], Any]:
        if kind == KIND:
            return self._jobs, key
        return self._children.setdefault(key, {}), (kind, name)


def _version(manifest: Mapping[str, Any]) -> int:
    return _number((manifest.get("metadata") or {}).get("resourceVersion", ""))


def _number(version: object) -> int:
    # Officially opaque until Kubernetes 1.35, always a counter of etcd's.
    return int(version) if isinstance(version, str) and version.isdecimal() else 0


def _compact(kind: str, manifest: Manifest) -> bytes:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    if LAST_APPLIED in (annotations := metadata.get("annotations") or {}):
        metadata["annotations"] = {name: value for name, value in annotations.items() if name != LAST_APPLIED}
    return json.dumps({**manifest, "kind": kind, "metadata": metadata}, separators=(",", ":")).encode()
