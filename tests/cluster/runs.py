"""Runs of examples/sort-letters on the node, and what is read of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from cluster.images import Image
from cluster.node import Node
from cluster.pods import phase, pod, pod_spec
from control_plane.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "sort-letters"
READER = Path(__file__).parent / "in_pod" / "read_run.py"
NAME = "sort-letters"
GROUPS_PER_STEP = 16
READER_S = 120.0


def apply_example(jobs: Jobs, overlay: Path | None = None, **spec: Any) -> None:
    """``kubectl apply -k examples/sort-letters``.

    Args:
        jobs: where.
        overlay: a directory for a kustomization upon it, when the spec is to be another one.
        spec: what of the spec.
    """
    directory = EXAMPLE
    if overlay is not None:
        directory = overlay
        patch = {
            "apiVersion": "inflight.dev/v1alpha1",
            "kind": "RLTrainingJob",
            "metadata": {"name": NAME},
            "spec": spec,
        }
        kustomization = {
            "resources": [os.path.relpath(EXAMPLE, overlay.resolve())],
            "patches": [{"patch": yaml.safe_dump(patch)}],
        }
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    jobs.kubectl("apply", "-n", jobs.namespace, "-k", str(directory))


def step(jobs: Jobs) -> int:
    """The step that the job's status tells of."""
    status = jobs.status(NAME)
    assert status.get("phase") != "Failed", status
    return int((status.get("progress") or {}).get("step", 0))


def wait_step(jobs: Jobs, wanted: int, deadline_s: float = 300.0) -> None:
    """Wait until the job's status tells of a step."""
    jobs.eventually(f"step {wanted}", lambda: step(jobs) >= wanted, deadline_s)


def read_run(node: Node, jobs: Jobs, image: Image) -> dict[str, Any]:
    """What a pod finds on the run's two claims; see in_pod/read_run.py."""
    mounts = {"checkpoints": "/checkpoints", "ledger": "/ledger", "tmp": "/tmp"}
    spec = pod_spec(
        image.name,
        ["python", "-c", READER.read_text()],
        volumeMounts=[{"name": name, "mountPath": path} for name, path in mounts.items()],
        env=[{"name": "USER", "value": "inflight"}, {"name": "HF_HUB_OFFLINE", "value": "1"}],
    )
    spec["volumes"] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": f"{NAME}-checkpoint"}},
        {"name": "ledger", "persistentVolumeClaim": {"claimName": f"{NAME}-coordinator"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    node.kubectl.create([pod("reader", spec)], "-n", jobs.namespace)
    phase(node.kubectl, jobs.namespace, "reader", "Succeeded", READER_S)
    found: dict[str, Any] = json.loads(node.kubectl("logs", "reader", "-n", jobs.namespace).splitlines()[-1])
    return found


def check_run(found: dict[str, Any], steps: int) -> None:
    """The run is whole, has learned, and its newest checkpoint is a model that answers."""
    check_whole(found, steps)
    assert mean(found["exact"][:10]) <= 0.25
    assert mean(found["exact"][-30:]) >= 0.75
    # Of all 512 strings: of a handful, a model that has learned gets half wrong once in twenty runs.
    wrong = {letters: answer for letters, answer in found["answers"].items() if answer != "".join(sorted(letters))}
    assert len(wrong) <= 0.3 * len(found["answers"]), wrong


def check_whole(found: dict[str, Any], steps: int) -> None:
    """Each step was made once in the history that survived, and the ledger adds up."""
    assert found["steps"] == list(range(1, steps + 1))
    assert found["epochs"] == sorted(found["epochs"]), "a step of an older epoch survived after one of a newer epoch"
    assert found["checkpoint"] == f"step-{steps:08}"
    assert found["groups"] == found["distinct_groups"]
    assert set(map(int, found["trained_by_step"])) == set(range(1, steps + 1))
    assert max(found["trained_by_step"].values()) <= GROUPS_PER_STEP
    assert found["states"].get("leased", 0) == 0


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)
