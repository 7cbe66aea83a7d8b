"""What the operator knows of the cluster: the jobs and their children as they were last seen.

Kept up to date by watches, by the answers to our own writes, and by a look at everything from time to time, since a
watch that was cut off does not tell of what was deleted meanwhile. It may be behind the cluster; what is decided on it
is written so that it fails on a newer object (POST first, uids), and the next event puts it right.
"""

from __future__ import annotations

import json
from collections import OrderedDict
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
MOST_GRAVES: Final = 10_000
"""Deleted objects that are remembered: a read or a write that began before may bring one of them back much later."""
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def key_of(kind: str, manifest: Manifest) -> str:
    """``namespace/name`` of the job that an object is, or that its labels say it belongs to; empty for neither."""
    metadata = manifest.get("metadata") or {}
    name = metadata.get("name") if kind == KIND else (metadata.get("labels") or {}).get(names.JOB_LABEL)
    return f"{metadata.get('namespace', '')}/{name}" if name else ""


class Store:
    """Objects by job. An older version never replaces a newer one, nor brings back what was deleted after it."""

    def __init__(self) -> None:
        # As text: a tenth of what the parsed objects would take.
        self._jobs: dict[str, tuple[int, bytes]] = {}
        self._children: dict[str, dict[Address, tuple[int, bytes]]] = {}
        self._whose: dict[tuple[str, str, str], str] = {}
        """Keys by kind, namespace and name of a child: its label may be changed."""
        self._graves: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        """Versions of deletions by kind, namespace and name."""

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

    def put(self, kind: str, manifest: Manifest) -> set[str]:
        """Take in an object.

        Args:
            kind: of the object (a watch does not always say).
            manifest: the whole object.

        Returns:
            Keys of the jobs that this is news of: none, its own, or two when its label was changed by hand.
        """
        key, version = key_of(kind, manifest), _version(manifest)
        namespace, name = _place(manifest)
        before = key if kind == KIND else self._whose.get((kind, namespace, name), "")
        if version <= max(self._version_of(kind, before, name), self._graves.get((kind, namespace, name), -1)):
            return set()
        if before and before != key:
            self._drop(kind, before, name)
        if key:
            self._keep(kind, key, name, (version, _compact(kind, manifest)))
        return {key, before} - {""}

    def remove(self, kind: str, manifest: Manifest) -> set[str]:
        """Drop an object that was deleted; key of its job, none when nothing was known of it."""
        namespace, name = _place(manifest)
        key = key_of(kind, manifest) if kind == KIND else self._whose.get((kind, namespace, name), "")
        version, known = _version(manifest), self._version_of(kind, key, name)
        if known > version:
            return set()
        self._bury(kind, namespace, name, version)
        if known < 0:
            return set()
        self._drop(kind, key, name)
        return {key}

    def compare(self, kind: str, listed: Iterable[Manifest], as_of: str) -> tuple[set[str], list[Manifest]]:
        """Drop what is not listed any more.

        Args:
            kind: of the objects.
            listed: all of them, their metadata at least.
            as_of: resource version of the list; what is newer is kept.

        Returns:
            Keys of the jobs that lost something, and the listed objects that are newer than what is known.
        """
        present: set[tuple[str, str]] = set()
        newer: list[Manifest] = []
        for manifest in listed:
            namespace, name = _place(manifest)
            present.add((namespace, name))
            key = key_of(kind, manifest)
            known = max(self._version_of(kind, key, name), self._graves.get((kind, namespace, name), -1))
            if key and known < _version(manifest):
                newer.append(manifest)
        lost: set[str] = set()
        limit = _number(as_of)
        for key, name, version in self._known(kind):
            namespace = key.partition("/")[0]
            if (namespace, name) not in present and version <= limit:
                lost.add(key)
                self._drop(kind, key, name)
                self._bury(kind, namespace, name, limit)
        return lost, newer

    def drop_all(self, kind: str) -> set[str]:
        """Drop all objects of a kind that the API server does not have any more; keys of their jobs."""
        lost = set()
        for key, name, _ in self._known(kind):
            lost.add(key)
            self._drop(kind, key, name)
        return lost

    def _known(self, kind: str) -> list[tuple[str, str, int]]:
        """Key, name and version of all objects of a kind."""
        if kind == KIND:
            return [(key, key.partition("/")[2], version) for key, (version, _) in self._jobs.items()]
        return [
            (key, name, version)
            for key, children in self._children.items()
            for (of, name), (version, _) in children.items()
            if of == kind
        ]

    def _version_of(self, kind: str, key: str, name: str) -> int:
        found = self._jobs.get(key) if kind == KIND else self._children.get(key, {}).get((kind, name))
        return -1 if found is None else found[0]

    def _keep(self, kind: str, key: str, name: str, kept: tuple[int, bytes]) -> None:
        namespace = key.partition("/")[0]
        self._graves.pop((kind, namespace, name), None)
        if kind == KIND:
            self._jobs[key] = kept
            return
        self._whose[kind, namespace, name] = key
        self._children.setdefault(key, {})[kind, name] = kept

    def _drop(self, kind: str, key: str, name: str) -> None:
        if kind == KIND:
            del self._jobs[key]
            return
        del self._whose[kind, key.partition("/")[0], name]
        del self._children[key][kind, name]
        if not self._children[key]:
            del self._children[key]

    def _bury(self, kind: str, namespace: str, name: str, version: int) -> None:
        grave = (kind, namespace, name)
        self._graves[grave] = max(version, self._graves.pop(grave, -1))
        if len(self._graves) > MOST_GRAVES:
            self._graves.popitem(last=False)


def _place(manifest: Mapping[str, Any]) -> tuple[str, str]:
    metadata = manifest["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


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
