"""The state of a namespace in a form in which two namespaces can be compared: without what must differ, nothing else.

What must differ are the namespace's name, uids, times, resource versions, random tokens, and what is derived from
them: digests of manifests that name the namespace or the uid, and what Kubernetes draws for itself (addresses, nodes,
suffixes of pod names).
"""

from __future__ import annotations

import json
import re
from typing import Any

from .cluster import Kubectl

KINDS = (
    "rltrainingjobs,jobsets,jobs,statefulsets,deployments,services,configmaps,secrets,serviceaccounts,networkpolicies,"
    "poddisruptionbudgets,persistentvolumeclaims,pods"
)
MANAGER = "inflight-operator"
NOT_OURS = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
DRAWN = {
    "clusterIP": "<ip>",
    "clusterIPs": "<ip>",
    "hostIP": "<ip>",
    "hostIPs": "<ip>",
    "podIP": "<ip>",
    "podIPs": "<ip>",
    "nodeName": "<node>",
    "volumeName": "<volume>",
    "containerID": "<id>",
    "pod-template-hash": "<hash>",
    "controller-revision-hash": "<hash>",
    "currentRevision": "<hash>",
    "updateRevision": "<hash>",
    "jobset.sigs.k8s.io/job-key": "<hash>",
    "volume.kubernetes.io/selected-node": "<node>",
    "inflight.dev/desired-hash": "<hash>",
    "activeSeconds": "<seconds>",
}
"""Fields that Kubernetes fills in by chance, and digests of what must differ, by name. ``activeSeconds`` is a time."""
PATTERNS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"), "<time>"),
    (re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "<uid of something gone>"),
    (re.compile(r"(?<=-config-)[0-9a-f]{10}\b"), "<digest>"),
    (re.compile(r"(?<=-code-)[0-9a-f]{10}\b"), "<digest>"),
    (re.compile(r'(?<=-actor-)[0-9a-z]{7,10}(?=["\\ -])'), "<hash>"),
)


def snapshot(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """Everything in a namespace that is a job's or comes of one, by kind and name; pods by role, in order."""
    objects = kubectl.get(KINDS, "-n", namespace)["items"]
    known = {
        one["metadata"]["uid"]: f"<uid of {one['kind']} {one['metadata']['name']}>"
        for one in objects
        if one["kind"] != "Pod"
    }
    short = {uid[:8]: f"<start of {name[1:]}" for uid, name in known.items() if "RLTrainingJob" in name}
    found: dict[str, Any] = {}
    pods: dict[str, list[Any]] = {}
    for one in objects:
        kind, name = one["kind"], one["metadata"]["name"]
        if (kind, name) in NOT_OURS:
            continue
        if kind == "Pod":
            pods.setdefault(_maker(one), []).append(_plain(_without_name(one), namespace, known, short))
        else:
            found[f"{kind}/{name}"] = _plain(one, namespace, known, short)
    found |= {f"pods of {maker}": sorted(some, key=json.dumps) for maker, some in pods.items()}
    return {_text(name, namespace, known, short): value for name, value in sorted(found.items())}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two snapshots differ, one line each."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other})
        return [line for name in names for line in differences(one.get(name), other.get(name), f"{where}/{name}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{where}[{number}]")]
    return [] if one == other else [f"{where}: {_short(one)} | {_short(other)}"]


def _plain(manifest: dict[str, Any], namespace: str, known: dict[str, str], short: dict[str, str]) -> Any:
    metadata = dict(manifest["metadata"])
    for name in ("resourceVersion", "uid"):
        metadata.pop(name, None)
    ours = [entry for entry in metadata.pop("managedFields", []) if entry.get("manager") == MANAGER]
    made: dict[str, Any] = {**manifest, "metadata": metadata}
    made.pop("apiVersion", None)
    if manifest["kind"] == "Secret":
        made["data"] = dict.fromkeys(manifest.get("data") or {}, "<token>")
    if ours:
        # Who owns which field decides what a later apply takes away.
        owned = sorted(json.dumps({**entry, "time": ""}, sort_keys=True) for entry in ours)
        made["owned by the operator"] = [json.loads(text) for text in owned]
    return json.loads(_text(json.dumps(_drawn(made), sort_keys=True), namespace, known, short))


def _drawn(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: DRAWN[name] if name in DRAWN and part else _drawn(part) for name, part in value.items()}
    if isinstance(value, list):
        parts = [_drawn(part) for part in value]
        # Conditions are a set; who comes first is a matter of which controller was faster.
        return sorted(parts, key=lambda part: part["type"]) if _are_conditions(parts) else parts
    return value


def _are_conditions(parts: list[Any]) -> bool:
    return bool(parts) and all(isinstance(part, dict) and {"type", "status"} <= part.keys() for part in parts)


def _text(text: str, namespace: str, known: dict[str, str], short: dict[str, str]) -> str:
    text = text.replace(namespace, "<namespace>")
    for uid, name in known.items():
        text = text.replace(uid, name)
    for uid, name in short.items():
        text = re.sub(rf"\b{uid}\b", name, text)
    for pattern, name in PATTERNS:
        text = pattern.sub(name, text)
    return text


def _maker(pod: dict[str, Any]) -> str:
    labels = pod["metadata"].get("labels", {})
    return f"{labels.get('inflight.dev/job')} {labels.get('inflight.dev/role')}"


def _without_name(pod: dict[str, Any]) -> dict[str, Any]:
    """A pod without its own name where that is drawn by chance, so that it can be found in other fields as well."""
    metadata = pod["metadata"]
    if "generateName" not in metadata or metadata["name"].rpartition("-")[2].isdecimal():
        return pod
    suffix = metadata["name"].removeprefix(metadata["generateName"])
    named: dict[str, Any] = json.loads(
        json.dumps(pod).replace(metadata["name"], metadata["name"][: -len(suffix)] + "*")
    )
    return named


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]}..."
