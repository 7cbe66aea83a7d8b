"""The benchmark from its command line to its JSON, with runs that are played."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run
from local_runs import RunFailedError, Window
from streams import Stream

NOW = 1000.0
STEP_S = {run.ASYNC: 0.1, run.SYNC: 0.25}


class PlayedRoles:
    peak_pss: dict[str, int]

    def __init__(self) -> None:
        self.peak_pss = {}

    def sample_memory(self) -> None:
        self.peak_pss = {"coordinator": 80_000_000, "inference-0": 900_000_000, "inference-1": 910_000_000}


class PlayedRun:
    """Steps of a fixed length, an update of each server after each, for 20 s."""

    directory = Path("/nowhere")

    def __init__(self, name: str, step_s: float, log: list[str]) -> None:
        self.name = name
        self.step_s = step_s
        self.log = log
        self.asked = 0

    def wait_until_steady(self) -> PlayedRoles:
        self.log.append(self.name)
        return PlayedRoles()

    def steps(self) -> int:
        self.asked += 1
        return 5 * self.asked

    def check(self) -> None:
        if "broken" in self.name:
            raise self.failure("ended too early, with exit code 1")

    def measure(self, roles: PlayedRoles, during: Callable[[], None]) -> Window:
        during()
        return Window(NOW, NOW + 10, {"coordinator": 1.0, "trainer": 4.0}, 0.5)

    def records(self, file: str) -> list[dict[str, Any]]:
        count = int(20 / self.step_s)
        if file == "metrics.jsonl":
            return [
                {
                    "time": NOW + number * self.step_s,
                    "attempts": 128,
                    "attempts_failed": 0,
                    "tokens_sampled": 500,
                    "staleness_mean": 1.5,
                    "step_seconds": self.step_s,
                    "wait_seconds": self.step_s / 5,
                    "optimizer_seconds": 4 * self.step_s / 5,
                }
                for number in range(count)
            ]
        return [
            {
                "time": NOW + number * self.step_s + 0.03,
                "server": server,
                "update_ms": 20.0,
                "receive_ms": 5.0,
                "pause_ms": 2.0,
                "skipped": 0,
                "ok": True,
            }
            for number in range(count)
            for server in ("inference-0", "inference-1")
        ]

    def stop(self) -> None:
        self.log.append(f"{self.name} stopped")

    def failure(self, what: str) -> RunFailedError:
        return RunFailedError(f"the run {self.name} {what}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs as they begin and end."""
    names: list[str] = []

    @contextlib.contextmanager
    def played(name: str, job: Path, scratch: Path, overrides: list[str]) -> Iterator[PlayedRun]:
        staleness = next(int(one.rpartition("=")[2]) for one in overrides if "maxStaleness" in one)
        yield PlayedRun(f"{job.stem}:{name}", STEP_S[staleness], names)

    tokens = [NOW + number / 100 for number in range(1001)]
    monkeypatch.setattr(run, "bench_run", played)
    monkeypatch.setattr(run, "example_job", lambda: Path("example.yaml"))
    monkeypatch.setattr(run, "long_tailed_job", lambda scratch: Path("long.yaml"))
    monkeypatch.setattr(
        run, "record_streams", lambda *_, **__: [Stream(f"inference-{number}", tokens) for number in range(2)]
    )
    monkeypatch.setattr(run, "usable_cores", lambda: 2)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(run, "QUICK", run.Plan(0, 0, 0, 0, run.QUICK.short_order, run.QUICK.long_order))
    monkeypatch.setattr(run, "FULL", run.Plan(0, 0, 0, 0, run.FULL.short_order, run.FULL.long_order))
    return names


def benchmark(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    return run.main()


def test_one_json_object_with_every_figure_is_printed_and_written(
    log: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert benchmark(monkeypatch, "--quick", "--output", str(tmp_path / "bench.json")) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert (tmp_path / "bench.json").read_text() == printed
    assert result["quick"]
    demo = result["demo"]
    assert demo["steps_per_second"] == pytest.approx(10)
    assert demo["completions_per_second"] == pytest.approx(1280)
    assert demo["trainer_wait_share"] == pytest.approx(0.2)
    assert demo["update_ms"]["p95"] == 20.0
    assert demo["token_gap_ms"]["over_updates"]["p95"] == pytest.approx(10, abs=0.1)
    assert demo["token_gap_ms"]["median"] == pytest.approx(10, abs=0.1)
    assert result["streams"]["token_gap_ms"]["over_updates"]["p95"] == pytest.approx(10, abs=0.1)
    assert demo["cpu"]["coordinator"] == {"of_machine": 0.05, "of_one_core": 0.1}
    assert demo["memory_pss_mb"]["inference-1"] == 910.0
    for kind in ("short_answers", "long_tailed_answers"):
        assert result["async_vs_sync"][kind]["ratio"] == pytest.approx(2.5)
    assert all(target["met"] for target in result["targets"].values())
    assert result["targets"]["server_pss_mb"]["measured"] == 910.0


def test_one_side_of_a_comparison_frames_the_other(
    log: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark(monkeypatch) == 0
    begun = [name for name in log if not name.endswith("stopped")]
    assert begun == [
        "example:demo",
        "long:streams",
        "example:short-1-staleness-0",
        "example:short-2-staleness-4",
        "long:long-0-staleness-0",
        "long:long-1-staleness-4",
        "long:long-2-staleness-0",
    ]
    assert log == [entry for name in begun for entry in (name, f"{name} stopped")], "one run at a time"
    result = json.loads(capsys.readouterr().out)
    assert [len(result["async_vs_sync"]["short_answers"][side]) for side in ("async", "sync")] == [2, 1]
    assert [len(result["async_vs_sync"]["long_tailed_answers"][side]) for side in ("async", "sync")] == [1, 2]


def test_a_missed_target_fails_nothing(
    log: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STEP_S, run.ASYNC, 1.0)
    assert benchmark(monkeypatch, "--quick") == 0
    targets = json.loads(capsys.readouterr().out)["targets"]
    assert not targets["steps_per_second"]["met"]
    assert not targets["completions_per_second"]["met"]
    assert targets["update_ms_p95"]["met"]


def test_a_run_that_fails_fails_the_benchmark_and_nothing_is_printed_as_a_result(
    log: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "long_tailed_job", lambda scratch: Path("broken.yaml"))
    monkeypatch.setattr(run, "QUICK", run.Plan(0, 0, 0, 0.001, run.QUICK.short_order, run.QUICK.long_order))
    assert benchmark(monkeypatch, "--quick") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the run broken:long-0-staleness-4 ended too early" in captured.err
