"""Runs in a pod that sees a run's two claims: what the run wrote, and what its newest model answers, as JSON."""

import json
import pathlib
import shutil
import sqlite3
import sys
from collections import Counter
from itertools import product

import torch
import transformers

PROBLEMS = ["".join(letters) for letters in product("abcdefgh", repeat=3)]

(run,) = pathlib.Path("/checkpoints").glob("sort-letters-*")
exact, epochs, stale = {}, {}, {}
for line in (run / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    exact[record["step"]] = record["reward/exact"]  # a replayed step counts as it was replayed
    epochs[record["step"]] = record["epoch"]
    stale[record["step"]] = record["staleness_max"]

copy = pathlib.Path("/tmp/ledger")
shutil.copytree("/ledger/run", copy, ignore=shutil.ignore_patterns("payloads*"))
groups = sqlite3.connect(copy / "ledger.sqlite").execute("SELECT id, state, step FROM groups").fetchall()

newest = max((run / "checkpoints").glob("step-*"))
model = transformers.AutoModelForCausalLM.from_pretrained(newest / "model")
tokenizer = transformers.AutoTokenizer.from_pretrained(newest / "model")
chats = [[{"role": "user", "content": f"sort:{letters}"}] for letters in PROBLEMS]
prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.no_grad():
    rows = model.generate(**prompts, max_new_tokens=4, do_sample=False)[:, prompts["input_ids"].shape[1] :]
answers = dict(zip(PROBLEMS, tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True))

sys.stdout.write(
    json.dumps(
        {
            "exact": [exact[step] for step in sorted(exact)],
            "steps": sorted(exact),
            "epochs": [epochs[step] for step in sorted(epochs)],
            "staleness_max": [stale[step] for step in sorted(stale)],
            "checkpoint": newest.name,
            "answers": answers,
            "states": Counter(state for _, state, _ in groups),
            "groups": len(groups),
            "distinct_groups": len({group for group, _, _ in groups}),
            "trained_by_step": Counter(step for _, state, step in groups if state == "trained"),
        }
    )
)
