"""Reading job files: YAML as kubectl reads it, and files that are no job at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from inflight_runtime.api import JobError, load_job, parse_job
from inflight_runtime.api.loading import MAX_BYTES, read_yaml

JOB = """\
apiVersion: inflight.dev/v1alpha1
kind: RLTrainingJob
metadata:
  name: sort-letters
spec:
  model: {source: ./model}
  environment: {entrypoint: "environment:SortLetters", args: {letters: 3}}
  algorithm: {steps: 100}
"""


def refused(text: str) -> str:
    with pytest.raises(JobError) as caught:
        parse_job(text, "job.yaml")
    return str(caught.value)


def test_a_minimal_job_gets_the_recipe_of_pipelinerl() -> None:
    spec = parse_job(JOB, "job.yaml").spec
    assert (spec.algorithm.prompts_per_step, spec.algorithm.group_size, spec.algorithm.max_staleness) == (128, 8, 4)
    assert (spec.algorithm.loss.kind, spec.algorithm.loss.is_cap) == ("reinforce_tis", 2.0)
    assert (spec.algorithm.loss.normalization, spec.algorithm.loss.entropy_bonus) == ("token_sum_per_sequence", 0.0)
    assert (spec.sampling.max_tokens, spec.sampling.temperature) == (8192, 1.0)
    assert (spec.trainer.optimizer.learning_rate, spec.trainer.optimizer.grad_clip_norm) == (1e-6, 1.0)
    assert spec.inference.replicas is None  # an autoscaler may own it


def test_null_means_the_default_as_it_does_to_the_api_server() -> None:
    job = parse_job(JOB.replace("100}", "100, groupSize: , shuffle: null}") + "  sampling:\n", "job.yaml")
    assert job.spec.algorithm.group_size == 8
    assert job.spec.algorithm.shuffle is True
    assert job.spec.sampling.temperature == 1.0


def test_ppo_has_clips_and_no_cap() -> None:
    loss = parse_job(JOB.replace("steps: 100", "steps: 100, loss: {kind: ppo}"), "job.yaml").spec.algorithm.loss
    assert (loss.is_cap, loss.clip_low, loss.clip_high) == (None, 0.2, 0.2)


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-06", ".1e-5", "0.000001", "+1e-6", "0.1e-5"])
def test_a_learning_rate_is_a_number_however_it_is_written(written: str) -> None:
    text = JOB + f"  trainer: {{optimizer: {{learningRate: {written}}}}}\n"
    assert parse_job(text, "job.yaml").spec.trainer.optimizer.learning_rate == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", 8),
        ("0x10", 16),
        ("0o10", 8),
        ("-3", -3),
        ("2026-01-31", "2026-01-31"),
        ("1:30", "1:30"),
        ("1_000", 1000),
        ("1e3", 1000.0),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("e3", "e3"),
        (".", "."),
        ("-", None),
        ("1.2.3", "1.2.3"),
        ("0b1", 1),
        ("08", 8.0),
        ("0x_1F", 31),
        ("1_0e-1_0", 1e-9),
        ("_1", "_1"),
        ("0o8", "0o8"),
        ("=", "="),
        ("<<", "<<"),
        ("yes", True),
        ("~", None),
    ],
)
def test_scalars_mean_what_they_mean_to_kubectl(written: str, value: object) -> None:
    if written == "-":
        written = "'-'"
        value = "-"
    data, _ = read_yaml(f"x: {written}", "job.yaml")
    assert data == {"x": value}
    assert type(data["x"]) is type(value)


def test_json_is_a_job_file_too() -> None:
    assert parse_job(json.dumps(yaml.safe_load(JOB)), "job.json") == parse_job(JOB, "job.yaml")


def test_anchors_and_merge_keys_work() -> None:
    text = JOB.replace("  algorithm: {steps: 100}", "  algorithm: {<<: &a {steps: 100}, groupSize: 4}")
    spec = parse_job(text, "job.yaml").spec
    assert (spec.algorithm.steps, spec.algorithm.group_size) == (100, 4)


def test_empty_documents_around_the_job_are_passed_over() -> None:
    assert parse_job(f"---\n{JOB}---\n", "job.yaml").name == "sort-letters"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.yaml: holds nothing, not a job"),
        ("# nothing\n", "holds nothing"),
        ("[1, 2]", "holds a list, not a job"),
        ("hello", "holds a str, not a job"),
        (JOB + "---\n" + JOB, "job.yaml:10: holds 2 YAML documents; keep the RLTrainingJob in a file of its own"),
        (JOB + "  algorithm: {steps: 9}\n", "job.yaml:9: spec.algorithm: is given twice, here and in line 8"),
        (JOB.replace("steps: 100", "steps: 1, steps: 2"), "spec.algorithm.steps: is given twice"),
        ("a: b: c", "job.yaml:1: is not valid YAML in column 5"),
        ("a: [1, 2", "is not valid YAML"),
        ("spec:\n\tmodel: x", "indent with spaces, not with tabs"),
        ("a: !!python/object:os.system x", "remove the tag"),
        ("a: \x00", "is not allowed"),
        ("? [a]\n: b", "has a key that is not text"),
        ("a: *nowhere", "is not valid YAML"),
        (JOB.replace("letters: 3", 'x: "\\ud800"'), "half a character"),
        ("[" * 1200 + "]" * 1200, "nested too deeply"),
        (
            JOB.replace("{source: ./model}", "&m {source: ./model, volume: *m}"),
            "spec.model.volume.volume: unknown field",
        ),
        (JOB.replace("args: {letters: 3}", "args: &a {letters: *a}"), "nested more than 32 levels"),
    ],
)
def test_what_is_no_job_is_refused_in_one_message(text: str, words: str) -> None:
    assert words in refused(text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    latin, large = tmp_path / "latin.yaml", tmp_path / "large.yaml"
    latin.write_bytes("# Größe\n".encode("latin-1"))
    large.write_text("#" * (MAX_BYTES + 1))
    for path, words in [
        (tmp_path / "missing.yaml", "no such file or directory"),
        (tmp_path, "is a directory"),
        (latin, "is not UTF-8 text"),
        (large, "over the limit"),
    ]:
        with pytest.raises(JobError) as caught:
            load_job(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert words in str(caught.value)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert load_job(path).name == "sort-letters"


def loaded_by(modules: str, names: tuple[str, ...]) -> str:
    script = f"import sys, {modules}; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_the_resource_imports_nothing_heavy() -> None:
    modules = "inflight_runtime.api, inflight_runtime.config.render, inflight_runtime.config.checks"
    heavy = ("torch", "vllm", "aiohttp", "transformers", "numpy", "msgpack")
    assert loaded_by(modules, heavy) == "[]"


def test_a_roles_process_does_not_load_the_resource() -> None:
    assert loaded_by("inflight_runtime.config.roles", ("inflight_runtime.api", "yaml")) == "[]"
