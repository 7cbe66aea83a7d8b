"""What is left of a node whose process was killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.images import build_image
from cluster.node import network
from cluster.pods import phase, pod, pod_spec
from cluster.traces import Traces, traces, traces_at_rest
from control_plane.cluster import Kubectl, eventually
from control_plane.cluster.binaries import REAL_NODE, ensure_binaries

TESTS = Path(__file__).resolve().parents[1]
WAIT = ["python3", "-c", "import time; time.sleep(3600)"]


@dataclass(frozen=True)
class LeftUp:
    """``make node`` as a process, up; an image with Python in it is on the node."""

    process: subprocess.Popen[str]
    kubeconfig: Path
    image: str
    before: Traces


@pytest.fixture
def left_up() -> Iterator[LeftUp]:
    before = traces_at_rest()
    image = build_image("operator")
    command = [sys.executable, "-m", "cluster.node", "--image", str(image.archive)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield LeftUp(process, wait_until_up(process), image.name, before)
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_nothing_is_left_of_a_node_that_was_killed(left_up: LeftUp) -> None:
    before, kubeconfig = left_up.before, left_up.kubeconfig
    kubectl = Kubectl(ensure_binaries(REAL_NODE).programs["kubectl"], kubeconfig, kubeconfig.parents[1])
    volume = {"volumes": [{"name": "scratch", "emptyDir": {"medium": "Memory"}}]}
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    kubectl.create([pod("p", pod_spec(left_up.image, WAIT, **mount) | volume)], "-n", "default")
    phase(kubectl, "default", "p", "Running")
    with_pod = traces()
    changed = {name for name in with_pod._fields if getattr(with_pod, name) != getattr(before, name)}
    # All of it, or this test would not see what it looks for; the kernel's settings may have been so before.
    assert changed | {"settings"} == {*with_pod._fields}
    assert network.BRIDGE in with_pod.interfaces
    assert any(rule for rule in with_pod.rules if "KUBE-SERVICES" in rule)

    left_up.process.send_signal(signal.SIGKILL)

    eventually("the node is gone", lambda: not kubeconfig.exists(), 60)
    assert traces_at_rest() == before


def wait_until_up(process: subprocess.Popen[str]) -> Path:
    """Read what it says, which all has deadlines; return its kubeconfig."""
    assert process.stdout is not None
    told: list[str] = []
    while not told or not told[-1].startswith("Ctrl-C"):
        line = process.stdout.readline()
        assert line, f"it ended after saying {told}"
        told.append(line.strip())
    return Path(next(line.partition("KUBECONFIG=")[2] for line in told if "KUBECONFIG=" in line))
