"""docs/job-reference.md says what the models say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inflight_runtime.api import parse_job

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "make_job_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_smallest_job_of_the_reference_is_a_job() -> None:
    text = (ROOT / "docs" / "job-reference.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert parse_job(example, "docs/job-reference.md").spec.sampling.max_tokens == 256
