"""The fake nodes, and how a test lets a pod on them end.

Pods become ready by kwok's own stages. A pod that carries :data:`EXIT_CODE` ends with that code: put the annotation
into a pod template and each pod of it ends at once, or set it on running pods with :func:`end_pods`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .components import FAKE_NODE
from .kubectl import Kubectl

EXIT_CODE = "test.inflight.dev/exit-code"
MESSAGE = "test.inflight.dev/message"
"""The termination message of the pod's containers."""
EXIT_STAGE = Path(__file__).parent / "pod-exit.yaml"
STORAGE_CLASS: dict[str, Any] = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": "standard",
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "kubernetes.io/host-path",  # built into the controller manager
}


def fake_nodes(count: int) -> list[dict[str, Any]]:
    """Nodes with plenty of everything, eight GPUs each, and no taint."""
    annotation, _, value = FAKE_NODE.partition("=")
    resources = {"cpu": "64", "memory": "512Gi", "pods": "250", "nvidia.com/gpu": "8"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": f"fake-{number}",
                "annotations": {annotation: value},
                "labels": {"kubernetes.io/hostname": f"fake-{number}", "kubernetes.io/os": "linux"},
            },
            "status": {"capacity": resources, "allocatable": resources},
        }
        for number in range(count)
    ]


def end_pods(kubectl: Kubectl, namespace: str, selector: str, exit_code: int = 0, message: str = "") -> None:
    """Let the running pods that a label selector names succeed (code 0) or fail.

    Raises:
        KubectlError: no pod carries these labels, or the API server refused.
    """
    annotations = [f"{EXIT_CODE}={exit_code}", f"{MESSAGE}={message}"]
    # With a selector kubectl is content with no pod at all; with names it is not.
    names = [pod["metadata"]["name"] for pod in kubectl.get("pods", "-n", namespace, "-l", selector)["items"]]
    kubectl("annotate", "pods", *names, "-n", namespace, "--overwrite", *annotations)
