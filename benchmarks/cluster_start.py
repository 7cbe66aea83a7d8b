"""Measures the example's start on a real node: ``python benchmarks/cluster_start.py [--runs 3]``, as root.

From ``kubectl apply -k examples/sort-letters`` to the first optimizer step, with its parts. The node is this machine
(tests/cluster/node), the operator is installed by its chart, and the images are on the node already. Prints one JSON
object; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from machine_facts import environment_facts, tell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.images import build_image  # noqa: E402
from cluster.installed import installed_operator  # noqa: E402
from cluster.node import Node, running_node  # noqa: E402
from cluster.runs import NAME, apply_example  # noqa: E402
from control_plane.cluster import ClusterError, eventually  # noqa: E402
from control_plane.jobs import Jobs  # noqa: E402

DEADLINE_S = 600.0
SERVES = "Starting vLLM server on"
TRAINER_UP = re.compile(r"epoch 1 begins at step 0")
FIRST_STEP = re.compile(r"step 1/\d+:")
ROLES = ("coordinator", "inference", "actor", "trainer")


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def seconds(time_text: str) -> float:
    """A time of the API or of a log line, as Unix time."""
    whole, _, fraction = time_text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def logged(jobs: Jobs, pod: str, what: str | re.Pattern[str]) -> float | None:
    """When a pod first logged a line."""
    text = jobs.kubectl("logs", pod, "-n", jobs.namespace, "--timestamps", "--tail=-1")
    for line in text.splitlines():
        stamp, _, words = line.partition(" ")
        if re.search(what, words):
            return seconds(stamp)
    return None


def holds_since(pod: dict[str, Any], kind: str) -> float:
    """Since when a pod's condition holds, to the second; infinity when it does not."""
    found = [one for one in pod["status"]["conditions"] if one["type"] == kind and one["status"] == "True"]
    return seconds(found[0]["lastTransitionTime"]) if found else math.inf


def started(pod: dict[str, Any]) -> float:
    """When a pod's container started, to the second."""
    return max(seconds(one["state"]["running"]["startedAt"]) for one in pod["status"]["containerStatuses"])


def start_once(node: Node, namespace: str) -> dict[str, float]:
    """One start: seconds from the apply to each of its stages."""
    jobs = Jobs(node.kubectl, namespace)
    began = time.time()
    apply_example(jobs)
    applied = time.time()

    def trainer() -> str:
        return str(jobs.pods(NAME, "trainer")[0]["metadata"]["name"])

    jobs.wait_phase(NAME, "Running", deadline_s=DEADLINE_S)
    first_step = eventually("the first step", lambda: logged(jobs, trainer(), FIRST_STEP), DEADLINE_S)
    pods = [pod for role in ROLES for pod in jobs.pods(NAME, role)]
    servers = jobs.pods(NAME, "inference")
    model = seconds(jobs.there("job/make-tiny-model")["status"]["completionTime"])
    up = [logged(jobs, pod["metadata"]["name"], SERVES) for pod in servers]
    trainer_up = logged(jobs, trainer(), TRAINER_UP)
    assert trainer_up is not None and None not in up
    stages = {
        "applied": applied,
        "all_scheduled": max(holds_since(pod, "PodScheduled") for pod in pods),
        "all_containers_started": max(map(started, pods)),
        "model_made": model,
        "trainer_up": trainer_up,
        "first_server_up": min(filter(None, up)),
        "first_server_ready": min(holds_since(pod, "Ready") for pod in servers),
        "first_step": first_step,
    }
    return {f"{name}_s": round(max(0.0, at - began), 1) for name, at in stages.items()}


@contextlib.contextmanager
def prepared_node(scratch: Path) -> Iterator[Node]:
    say("a node, with both images and the operator")
    with running_node() as node:
        for target in ("operator", "runtime"):
            node.import_image(build_image(target, shown=False).archive)
        with installed_operator(node, scratch):
            yield node


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="starts to measure (default 3)")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts, runs = environment_facts(), []
    try:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch, prepared_node(Path(scratch)) as node:
            for number in range(options.runs):
                with node.namespace() as namespace:
                    runs.append(start_once(node, namespace))
                    say(f"start {number + 1}: {json.dumps(runs[-1])}")
                    node.kubectl("delete", f"rltj/{NAME}", "-n", namespace, "--timeout=60s", deadline_s=70.0)
    except ClusterError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    result = {
        "environment": facts,
        "median": {name: round(median(run[name] for run in runs), 1) for name in runs[0]},
        "starts": runs,
    }
    tell(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
