"""``inflight logs`` of real pods: merged, followed from one pod to the next, and of a container's life before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.images import Image
from cluster.node import Node
from cluster.pods import phase, pod, pod_spec
from control_plane.cluster import eventually
from control_plane.jobs import Jobs, job

DEADLINE_S = 60
COUNT = """
import sys, time
for number in range(int(sys.argv[1])):
    print(f"line {number}", flush=True)
    time.sleep(0.2)
"""
TWO_LIVES = """
import pathlib, sys, time
mark = pathlib.Path("/data/mark")
if not mark.exists():
    mark.touch()
    print("first life", flush=True)
    sys.exit(1)
print("second life", flush=True)
time.sleep(3600)
"""


def labelled(name: str, role: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A pod as the operator's children make it, as far as its logs go."""
    made = pod(name, spec)
    made["metadata"]["labels"] = {"inflight.dev/job": "letters", "inflight.dev/role": role}
    return made


def counting(name: str, role: str, image: str, lines: int) -> dict[str, Any]:
    return labelled(name, role, pod_spec(image, ["python3", "-c", COUNT, str(lines)]))


class Command:
    """``inflight logs``, as a process of its own."""

    def __init__(self, node: Node, namespace: str, directory: Path, *arguments: str) -> None:
        self._out = directory / "out"
        where = ["-n", namespace, "--kubeconfig", str(node.kubeconfig)]
        with self._out.open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inflight_runtime", "logs", "letters", *arguments, *where],
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def wait_line(self, line: str) -> None:
        eventually(f"the line {line}", lambda: line in self.lines, DEADLINE_S)


def finish(jobs: Jobs) -> None:
    patch = json.dumps({"status": {"phase": "Succeeded"}})
    jobs.kubectl("patch", "rltj/letters", "-n", jobs.namespace, "--subresource=status", "--type=merge", "-p", patch)


def test_a_role_is_followed_from_one_pod_to_the_next_until_the_job_is_over(
    node: Node, jobs: Jobs, image: Image, tmp_path: Path
) -> None:
    namespace, first, second = jobs.namespace, "letters-actor-a", "letters-actor-b"
    jobs.create(job("letters"))
    with Command(node, namespace, tmp_path, "actor", "-f") as command:
        jobs.kubectl.create([counting(first, "actor", image.name, 25)], "-n", namespace)
        command.wait_line(f"{first} | line 1")
        others = [counting(second, "actor", image.name, 5), counting("letters-t-n-0-0", "trainer", image.name, 5)]
        jobs.kubectl.create(others, "-n", namespace)
        command.wait_line(f"{second} | line 4")
        command.wait_line(f"{first} | line 24")
        finish(jobs)
        assert command.process.wait(DEADLINE_S) == 0
        lines = command.lines
    assert [line for line in lines if line.startswith(first)] == [f"{first} | line {number}" for number in range(25)]
    assert [line for line in lines if not line.startswith(first)] == [
        f"{second} | line {number}" for number in range(5)
    ]


def test_logs_as_they_are_and_a_life_before(node: Node, jobs: Jobs, image: Image, tmp_path: Path) -> None:
    namespace, server, trainer = jobs.namespace, "letters-inference-0", "letters-t-n-0-0"
    spec = pod_spec(image.name, ["python3", "-c", TWO_LIVES], volumeMounts=[{"name": "data", "mountPath": "/data"}])
    spec |= {"volumes": [{"name": "data", "emptyDir": {}}], "restartPolicy": "Always"}
    jobs.create(job("letters"))
    pods = [labelled(server, "inference", spec), counting(trainer, "trainer", image.name, 4)]
    jobs.kubectl.create(pods, "-n", namespace)
    phase(jobs.kubectl, namespace, trainer, "Succeeded")

    def again() -> bool:
        return "second life" in jobs.kubectl("logs", server, "-n", namespace)

    eventually("the server lives again", again, DEADLINE_S)

    def said(*arguments: str) -> list[str]:
        with Command(node, namespace, tmp_path, *arguments) as command:
            assert command.process.wait(DEADLINE_S) == 0
            return command.lines

    assert sorted(said("--tail", "2")) == [f"{server} | second life", f"{trainer} | line 2", f"{trainer} | line 3"]
    assert said("trainer", "--tail", "-1") == [f"{trainer} | line {number}" for number in range(4)]
    assert said("inference-0", "--previous") == [f"{server} | first life"]
    with Command(node, namespace, tmp_path, "-f") as following:
        following.wait_line(f"{server} | second life")
        following.process.send_signal(signal.SIGINT)
        assert following.process.wait(DEADLINE_S) == 130
