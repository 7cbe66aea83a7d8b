"""JobSet as its project ships it, changed in one thing: the API server calls its webhooks at a loopback port.

No Service, no proxy and no certificate manager is needed that way.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

NOT_SYSTEM = {
    "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}]
}
OF_A_JOBSET = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
PROBE: dict[str, Any] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {
        "replicatedJobs": [
            {
                "name": "w",
                "template": {
                    "spec": {
                        "template": {
                            "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "none"}]},
                        }
                    }
                },
            }
        ]
    },
}
"""The smallest JobSet; created with a dry run it says whether the webhooks answer (the controller's probes do not)."""


def custom_resources(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The CRDs of these files."""
    return [document for file in files for document in _documents(file)]


def webhooks(file: Path, port: int, authority: bytes) -> list[dict[str, Any]]:
    """The webhook configurations, calling ``localhost:port`` with a certificate of ``authority``."""
    configurations = []
    for document in _documents(file):
        document["metadata"]["name"] = f"jobset-{document['metadata']['name']}"
        for hook in document["webhooks"]:
            hook["clientConfig"] = {
                "url": f"https://localhost:{port}{hook['clientConfig']['service']['path']}",
                "caBundle": base64.b64encode(authority).decode(),
            }
            # What JobSet's kustomize patches add: it is not asked about what is none of its business.
            hook["namespaceSelector"] = NOT_SYSTEM
            if any("pods" in rule["resources"] for rule in hook["rules"]):
                hook["objectSelector"] = OF_A_JOBSET
        configurations.append(document)
    return configurations


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as stream:
        yield from (document for document in yaml.load_all(stream, yaml.CSafeLoader) if document)
