"""The operator on the node, installed by its chart as a cluster admin installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cluster.node import Node
from control_plane.cluster import ensure_program
from control_plane.helm import Helm

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "inflight"
SYSTEM = "inflight-system"
RELEASE = "inflight"
DEPLOYMENT = "inflight-operator"
ROLLOUT_S = 120


@contextlib.contextmanager
def installed_operator(node: Node, directory: Path) -> Iterator[Helm]:
    """Install the operator, whose image must be on the node already; uninstall it at the end.

    Its namespace admits restricted pods only.
    """
    helm = Helm(ensure_program("helm"), node.kubeconfig, directory)
    node.kubectl("create", "namespace", SYSTEM)
    node.kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=restricted")
    # The tests' cluster has crds/ applied by kubectl.
    taken_over = ("--take-ownership", "--force-conflicts")
    helm("install", RELEASE, str(CHART), "--namespace", SYSTEM, *taken_over)
    rollout = ("rollout", "status", f"deployment/{DEPLOYMENT}", "-n", SYSTEM, f"--timeout={ROLLOUT_S}s")
    node.kubectl(*rollout, deadline_s=ROLLOUT_S + 10.0)
    try:
        yield helm
    finally:
        helm("uninstall", RELEASE, "--namespace", SYSTEM)
