"""Runs of examples/sort-letters on the node, and what is read of them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from cluster.node import Node
from cluster.pods import phase, pod, pod_spec
from control_plane.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "sort-letters"
NAME = "sort-letters"
CHECKPOINTS = "sort-letters-checkpoint"
READER_S = 120.0

READ = """
import json, pathlib, sys
run, = pathlib.Path("/checkpoints").glob("sort-letters-*")
exact = {}
for line in (run / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    exact[record["step"]] = record["reward/exact"]  # a replayed step counts as it was replayed
newest = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[-1]))
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(newest / "model")
tokenizer = transformers.AutoTokenizer.from_pretrained(newest / "model")
answers = {}
for letters in ("hba", "cab", "gfe", "dac"):
    chat = [{"role": "user", "content": f"sort:{letters}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    answers[letters] = tokenizer.decode(out[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)
print(json.dumps({"exact": [exact[step] for step in sorted(exact)], "checkpoint": newest.name, "answers": answers}))
"""


def apply_example(jobs: Jobs, **spec: Any) -> None:
    """``kubectl apply -k examples/sort-letters``, with parts of the spec changed right afterwards."""
    jobs.kubectl("apply", "-n", jobs.namespace, "-k", str(EXAMPLE))
    if spec:
        jobs.patch(NAME, spec)


def read_checkpoint(node: Node, jobs: Jobs, image: str) -> dict[str, Any]:
    """What a pod finds on the checkpoint claim: exact match by step, and what the newest model answers greedily."""
    mounts = [{"name": "checkpoints", "mountPath": "/checkpoints"}, {"name": "tmp", "mountPath": "/tmp"}]
    spec = pod_spec(image, ["python", "-c", textwrap.dedent(READ)], volumeMounts=mounts)
    spec["volumes"] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": CHECKPOINTS}},
        {"name": "tmp", "emptyDir": {}},
    ]
    spec["containers"][0]["env"] = [{"name": "USER", "value": "inflight"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    node.kubectl.create([pod("reader", spec)], "-n", jobs.namespace)
    phase(node.kubectl, jobs.namespace, "reader", "Succeeded", READER_S)
    found: dict[str, Any] = json.loads(node.kubectl("logs", "reader", "-n", jobs.namespace).splitlines()[-1])
    return found


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)
