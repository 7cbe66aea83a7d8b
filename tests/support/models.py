"""The examples' models for tests: made once by the examples' own scripts and kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAKE_DEADLINE_S = 600.0


def sort_letters_model() -> Path:
    """The warm-started model of ``examples/sort-letters``, in a directory that must not be written to."""
    return example_model("sort-letters")


def smollm2_model() -> Path:
    """SmolLM2-135M-Instruct as ``examples/smollm2-arithmetic`` converts it; must not be written to."""
    return example_model("smollm2-arithmetic")


def example_model(example: str) -> Path:
    """Make an example's model unless the cache has it; the cache's key is the text of the example's Python files."""
    files = sorted((EXAMPLES / example).glob("*.py"))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight" / "test-models"
    directory = cache / f"{example}-{key}"
    with _locked(cache, example):
        if not directory.exists():
            for older in cache.glob(f"{example}-*"):
                if older.is_dir():
                    shutil.rmtree(older)
            command = [sys.executable, str(EXAMPLES / example / "make_model.py"), "--output", str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_DEADLINE_S, check=False)
            assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
        own = EXAMPLES / example / "model"
        if not own.exists():
            # The demos that CI runs next need the very same files: converting SmolLM2 twice would cost half a minute.
            unfinished = own.with_name("model.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(directory, unfinished)
            unfinished.rename(own)
    return directory


@contextlib.contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    """Keep test sessions that run at the same time from making one model twice."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
