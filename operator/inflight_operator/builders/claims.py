"""PersistentVolumeClaims: the coordinator's, the checkpoints', and the one that a hub model is fetched into.

They are objects of their own, not ``volumeClaimTemplates``: those outlive everything, and a later job of the same name
would be given them. Each carries the uid of the run whose data it holds.
"""

from __future__ import annotations

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_runtime.api.placement import Storage


def coordinator_claim(build: Build) -> Manifest:
    """Claim of the ledger and the payloads; it goes with the job."""
    return _claim(build, names.coordinator(build.name), names.COORDINATOR, build.job.spec.coordinator.storage)


def checkpoint_claim(build: Build) -> Manifest | None:
    """Claim of the checkpoints; ``None`` where the job names one that exists. ``onDelete: Retain`` has no owner."""
    checkpoint = build.job.spec.checkpoint
    if checkpoint.claim_name is not None:
        return None
    storage = Storage() if checkpoint.storage is None else checkpoint.storage
    owned = checkpoint.on_delete == "Delete"
    return _claim(build, names.checkpoint(build.name), names.TRAINER, storage, owned=owned)


def checkpoint_claim_name(build: Build) -> str:
    """Name of the claim that the trainer writes to, the job's own or the user's."""
    return build.job.spec.checkpoint.claim_name or names.checkpoint(build.name)


def model_claim(build: Build) -> Manifest:
    """Claim of a fetched model; it goes with the job."""
    settings = build.settings
    storage = Storage(size=settings.model_storage, access_modes=[settings.model_access_mode])
    return _claim(build, names.model(build.name), names.MODEL, storage)


def _claim(build: Build, name: str, role: str, storage: Storage, *, owned: bool = True) -> Manifest:
    metadata = build.metadata(name, role, owned=owned)
    metadata["labels"] = {**metadata["labels"], names.RUN_UID_LABEL: build.facts.uid}
    spec = {
        "accessModes": list(storage.access_modes),
        "resources": {"requests": {"storage": storage.size}},
    }
    storage_class = storage.class_ or build.settings.storage_class
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
