"""What is left of a node whose process was killed: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.images import build_image
from cluster.node import machine, network, teardown
from cluster.pods import phase, pod, pod_spec
from cluster.traces import traces
from control_plane.cluster import Kubectl, eventually
from control_plane.cluster.binaries import REAL_NODE, ensure_binaries

TESTS = Path(__file__).resolve().parents[1]
WAIT = ["python3", "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def image() -> tuple[str, Path]:
    """An image with Python in it: its name, and its archive."""
    built = build_image("operator")
    return built.name, built.archive


@pytest.fixture
def left_up(image: tuple[str, Path]) -> Iterator[subprocess.Popen[str]]:
    """``make node`` as a process."""
    machine.check()
    ensure_binaries(REAL_NODE)
    command = [sys.executable, "-m", "cluster.node", "--image", str(image[1])]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.timeout(300, func_only=True)
def test_nothing_is_left_of_a_node_that_was_killed(image: tuple[str, Path], left_up: subprocess.Popen[str]) -> None:
    machine.check()
    before = traces()
    kubeconfig = wait_until_up(left_up)
    kubectl = Kubectl(ensure_binaries(REAL_NODE).programs["kubectl"], kubeconfig, kubeconfig.parents[1])
    volume = {"volumes": [{"name": "scratch", "emptyDir": {"medium": "Memory"}}]}
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    kubectl.create([pod("p", pod_spec(image[0], WAIT, **mount) | volume)], "-n", "default")
    phase(kubectl, "default", "p", "Running")
    with_pod = traces()
    changed = {name for name in with_pod._fields if getattr(with_pod, name) != getattr(before, name)}
    # All of it, or this test would not see what it looks for; the kernel's settings may have been so before.
    assert changed | {"settings"} == {*with_pod._fields}
    assert network.BRIDGE in with_pod.interfaces
    assert any(rule for rule in with_pod.rules if "KUBE-SERVICES" in rule)

    left_up.send_signal(signal.SIGKILL)

    eventually("the node is gone", lambda: not kubeconfig.exists(), 60)
    eventually("its keeper as well", lambda: not traces().processes, 10)
    assert traces() == before
    assert not teardown.pod_processes()


def wait_until_up(process: subprocess.Popen[str]) -> Path:
    """Read what it says; return its kubeconfig."""
    assert process.stdout is not None
    told: list[str] = []
    while not told or not told[-1].startswith("Ctrl-C"):
        line = process.stdout.readline()
        assert line, f"it ended after saying {told}"
        told.append(line.strip())
    return Path(next(line.partition("KUBECONFIG=")[2] for line in told if "KUBECONFIG=" in line))
