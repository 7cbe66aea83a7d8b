"""What every builder gets, and what it gives: a job with the facts around it in, manifests out. All of it is pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from inflight_operator import names
from inflight_operator.settings import Settings
from inflight_runtime.api import API_VERSION, KIND, RLTrainingJob

Manifest = dict[str, Any]

BUILDER_REVISION: Final = "5"
"""Raised whenever a builder makes something else of the same job; running jobs keep what they were started with."""
DIGEST_LENGTH: Final = 10
CONTENT: Final = frozenset({"Secret"})
"""Kinds whose ``data`` stays out of the desired hash: it is made once, and kept."""
WORKLOADS: Final = frozenset({"StatefulSet", "Deployment", "JobSet", "Job"})
"""Kinds that have pods."""
RUN_TIME_FIELDS: Final = {"StatefulSet": "replicas", "Deployment": "replicas", "JobSet": "suspend"}
"""The one field of each kind's spec that changes while a job runs; it is left out of the desired hash."""


@dataclass(frozen=True, slots=True)
class EnvironmentCode:
    """Content of the ConfigMap that a job names as ``spec.environment.configMap``.

    Attributes:
        data: text files by name.
        binary_data: other files, in base64.
    """

    data: Mapping[str, str] = field(default_factory=dict)
    binary_data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a job's spec does not say and its cluster does.

    Attributes:
        namespace: of the job.
        uid: of the job.
        token: bearer token of the run.
        code: the environment's files, for a job that names a ConfigMap; of a running job those of its own copy.
        inference_replicas: servers to write where the spec leaves the number open.
        actor_replicas: actors, likewise.
        images: image of each role as the run was started with, which a running job keeps; empty at a start.
        servers_at_start: servers that the run was started with: the role configs follow from them, and scaling must
            not change what the pods were made from. ``None`` at a start.
        actors_at_start: actors, likewise.
    """

    namespace: str
    uid: str
    token: str = field(repr=False)
    code: EnvironmentCode = field(default_factory=EnvironmentCode)
    inference_replicas: int = 1
    actor_replicas: int = 1
    images: Mapping[str, str] = field(default_factory=dict)
    servers_at_start: int | None = None
    actors_at_start: int | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """One job on its way to manifests."""

    job: RLTrainingJob
    settings: Settings
    facts: Facts

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def servers(self) -> int:
        """Inference servers wanted."""
        given = self.job.spec.inference.replicas
        return self.facts.inference_replicas if given is None else given

    @property
    def actors(self) -> int:
        """Actors wanted."""
        given = self.job.spec.actors.replicas
        return self.facts.actor_replicas if given is None else given

    def metadata(self, name: str, role: str = "", *, owned: bool = True) -> dict[str, Any]:
        """Metadata of a child.

        Args:
            name: of the child.
            role: left out on what all roles share.
            owned: whether it goes with the job.
        """
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.facts.namespace,
            "labels": names.labels(self.name, role),
        }
        if owned:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": self.name,
                    "uid": self.facts.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ]
        return metadata


@dataclass(frozen=True, slots=True)
class Child:
    """One object of the job.

    Attributes:
        manifest: the whole object, with its desired hash.
        role: whose it is; empty for what all roles share.
        waits_for_model: make it only when the Job that fetches the model has completed.
        replicas_are_ours: false where the spec leaves ``replicas`` open: the number is written when the object is
            made and at suspend and resume, and belongs to an autoscaler or a person between.
    """

    manifest: Manifest
    role: str = ""
    waits_for_model: bool = False
    replicas_are_ours: bool = True

    @property
    def kind(self) -> str:
        """Kind of the object."""
        return str(self.manifest["kind"])

    @property
    def name(self) -> str:
        """Name of the object."""
        return str(self.manifest["metadata"]["name"])


def role_of(manifest: Manifest) -> str:
    """Role that an object's labels name; empty for none."""
    return str((manifest["metadata"].get("labels") or {}).get(names.ROLE_LABEL, ""))


def pod_template_of(manifest: Manifest) -> Manifest | None:
    """Pod template of a workload, that of a JobSet's one replicated job too; ``None`` for any other object."""
    spec = manifest.get("spec") or {}
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template = spec.get("template")
    return template if isinstance(template, dict) else None


def finished(manifest: Manifest) -> Manifest:
    """The manifest with its desired hash and the builders' revision as annotations."""
    annotations = {names.HASH_ANNOTATION: desired_hash(manifest), names.REVISION_ANNOTATION: BUILDER_REVISION}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def desired_hash(manifest: Manifest) -> str:
    """Digest of what a manifest asks for, without the field that changes at run time and without a Secret's data.

    Annotations of a child are the builders' own (:func:`finished`) and do not count.
    """
    kept = {name: value for name, value in manifest.items() if name != "data" or manifest["kind"] not in CONTENT}
    kept["metadata"] = {name: value for name, value in manifest["metadata"].items() if name != "annotations"}
    if (volatile := RUN_TIME_FIELDS.get(manifest["kind"])) is not None:
        kept["spec"] = {name: value for name, value in manifest["spec"].items() if name != volatile}
    return digest(kept, 16)


def digest(content: object, length: int = DIGEST_LENGTH) -> str:
    """Hexadecimal digest of JSON-ready data, of ``length`` characters."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
