from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run
from figures import TooLittleDataError
from local_runs import RunFailedError, Window, bench_run
from streams import Stream


def update(server: str, at: float, ok: bool = True) -> dict[str, Any]:
    return {
        "server": server,
        "time": at,
        "update_ms": 100.0,
        "receive_ms": 20.0,
        "pause_ms": 5.0,
        "skipped": 1,
        "ok": ok,
    }


def test_an_update_weighs_on_the_streams_of_its_own_server_only() -> None:
    steady = Stream("inference-0", [index / 100 for index in range(1001)])
    stalling = Stream("inference-1", [0.0, 1.0, 1.01, 1.51, 1.52, 10.0])
    gaps = run.token_gaps([steady, stalling], [update("inference-0", 1.1), update("inference-1", 1.2)])
    assert gaps["over_updates"] == {"p50": 255.0, "p95": pytest.approx(475.5), "max": 500.0, "count": 2}
    assert gaps["between_updates"] is None, "one update a server: nothing lies between two"
    assert gaps["median"] == 10.0
    assert (gaps["streams"], gaps["tokens"]) == (2, 1007)


def test_gaps_without_an_update_under_way_are_no_result() -> None:
    with pytest.raises(TooLittleDataError):
        run.token_gaps([Stream("inference-0", [0.0, 1.0])], [update("inference-0", 5.0)])


def test_only_updates_of_the_window_count_and_failed_ones_are_told_apart() -> None:
    window = Window(10.0, 20.0, {}, 0.0)
    updates = [update("a", 9.9), update("a", 11.0), update("b", 12.0), update("b", 13.0, ok=False), update("a", 20.1)]
    figures = run.update_figures(updates, window)
    assert figures["update_ms"]["count"] == 2
    assert figures["updates_failed"] == 1
    assert figures["versions_skipped"] == 2


def test_shares_of_the_trainers_time_add_up() -> None:
    steps = [
        {"step_seconds": 0.2, "wait_seconds": 0.1, "optimizer_seconds": 0.1, "loss": 3.0},
        {"step_seconds": 0.2, "wait_seconds": 0.0, "optimizer_seconds": 0.2, "loss": 3.0},
    ]
    assert run.trainer_shares(steps) == {"wait": 0.25, "optimizer": 0.75}


def test_cpu_is_shown_of_the_machine_and_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "usable_cores", lambda: 2)
    shares = run.cpu_shares(Window(0.0, 10.0, {"coordinator": 2.0}, 1.0))
    assert shares == {
        "coordinator": {"of_machine": 0.1, "of_one_core": 0.2},
        "others": {"of_machine": 0.05, "of_one_core": 0.1},
    }


def test_targets_look_at_the_larger_server() -> None:
    demo = {
        "steps_per_second": 5.0,
        "completions_per_second": 640.0,
        "update_ms": {"p95": 30.0},
        "token_gap_ms": {"over_updates": {"p95": 25.0}},
        "cpu": {"coordinator": {"of_machine": 0.1, "of_one_core": 0.2}},
        "memory_pss_mb": {"inference-0": 900.0, "inference-1": 950.0, "coordinator": 80.0, "trainer": 2000.0},
    }
    values = run.target_values(demo, {"token_gap_ms": {"over_updates": {"p95": 12.0}}})
    assert values["server_pss_mb"] == 950.0
    assert (values["token_gap_ms_p95_in_demo"], values["token_gap_ms_p95_of_streams"]) == (25.0, 12.0)
    assert all(result["met"] for result in run.judge_targets(values).values())


def test_a_comparison_goes_in_the_given_order_and_relates_the_means() -> None:
    speeds = iter([8.0, 2.0, 3.0, 6.0])
    asked = []

    def measure(number: int, staleness: int) -> dict[str, Any]:
        asked.append((number, staleness))
        return {"steps_per_second": next(speeds)}

    result = run.compare((4, 0, 0, 4), measure)
    assert asked == [(0, 4), (1, 0), (2, 0), (3, 4)]
    assert result["ratio"] == pytest.approx(14 / 5)
    assert [one["steps_per_second"] for one in result["async"]] == [8.0, 6.0]


@pytest.mark.parametrize("plan", [run.FULL, run.QUICK])
def test_every_plan_begins_with_the_demo_and_has_both_sides(plan: run.Plan) -> None:
    assert plan.short_order[0] == run.ASYNC
    assert {run.ASYNC, run.SYNC} == set(plan.short_order) == set(plan.long_order)


def test_a_run_that_is_refused_fails_the_benchmark_in_its_own_words(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailedError, match=r"(?s)exit code 2.*nowhere\.yaml"),
        bench_run("refused", tmp_path / "nowhere.yaml", tmp_path, []) as started,
    ):
        started.wait_until_steady()


def test_steps_are_counted_by_whole_lines_as_they_come(tmp_path: Path) -> None:
    with bench_run("steps", tmp_path / "nowhere.yaml", tmp_path, []) as started:
        assert started.steps() == 0
        started.directory.mkdir(exist_ok=True)
        metrics = started.directory / "metrics.jsonl"
        metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
        assert started.steps() == 2
        assert started.records("metrics.jsonl") == [{"step": 1}, {"step": 2}]
        with metrics.open("a") as file:
            file.write('ep": 3}\n')
        assert started.steps() == 3
