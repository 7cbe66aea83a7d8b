"""The jobs that are measured: the example as it stands, and its variant with answers of long-tailed length."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

BENCHMARKS = Path(__file__).resolve().parent
EXAMPLE = BENCHMARKS.parent / "examples" / "sort-letters"
MODEL_LENGTH = 1024
LONGEST_ANSWER = 768
SLOW_ROLLOUT_S = 0.25
ENDLESS_STEPS = 1_000_000
"""A measured run is stopped when its time is up."""


def common_overrides(max_staleness: int) -> list[str]:
    """What every measured run changes in its job."""
    return [
        f"spec.algorithm.steps={ENDLESS_STEPS}",
        f"spec.algorithm.maxStaleness={max_staleness}",
        # Streams of several hundred tokens do not fit into the 128 that the example gives its servers.
        f"spec.inference.engineArgs.max-model-len={MODEL_LENGTH}",
    ]


def slow_overrides() -> list[str]:
    """For the long-tailed job: about three steps and updates a second that are next to no work for anybody."""
    return [
        "spec.algorithm.promptsPerStep=1",
        "spec.algorithm.groupSize=2",
        "spec.actors.concurrency=1",
        "spec.environment.args.median=4",
        f"spec.environment.args.pause_s={SLOW_ROLLOUT_S}",
    ]


def example_job() -> Path:
    """The job file of the example, its model made if it is not there yet.

    Raises:
        subprocess.CalledProcessError: the model cannot be made.
    """
    if not (EXAMPLE / "model").is_dir():
        subprocess.run([sys.executable, str(EXAMPLE / "make_model.py")], check=True, stdout=sys.stderr)
    return EXAMPLE / "job.yaml"


def long_tailed_job(directory: Path) -> Path:
    """Write the variant's job file, environment and model into ``directory``; returns the job file.

    The model is the example's with no end-of-sequence token: answers get the length that is asked for.
    """
    job = long_tailed(yaml.safe_load(example_job().read_text()))
    shutil.copytree(EXAMPLE / "model", directory / "model")
    shutil.copy(BENCHMARKS / "long_tailed.py", directory)
    for name, key in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ):
        file = directory / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: None}, indent=2))
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def long_tailed(job: dict[str, Any]) -> dict[str, Any]:
    """The example's job with the long-tailed environment; everything about training stays as it is."""
    spec = {name: value for name, value in job["spec"].items() if name != "evaluation"}
    spec["environment"] = {"entrypoint": "long_tailed:LongTailed", "args": {"longest": LONGEST_ANSWER}}
    spec["sampling"] = spec["sampling"] | {"maxTokens": LONGEST_ANSWER}
    spec["inference"] = spec["inference"] | {"engineArgs": {"max-model-len": MODEL_LENGTH}}
    return job | {"metadata": {"name": "long-tailed"}, "spec": spec}
