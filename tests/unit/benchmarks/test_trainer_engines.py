"""The benchmark of the trainer's engines: turns, figures, ratios, and one real start with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trainer_engines
import trainer_rank
from trainer_engines import SIDES, EngineFailedError, Side

from support.tiny_models import make_tiny_model


def rank(step: float, peak: float, **changes: Any) -> dict[str, Any]:
    """What a rank measured: every part takes as long as the step."""
    return {
        "steps": [dict.fromkeys([*trainer_engines.PARTS, "cpu"], value) for value in (step, 3 * step, 2 * step)],
        "export": [step, step],
        "save": step,
        "load": step,
        "peak_rss_mb": {"load": 2 * peak, "train": peak, "export": peak, "save": peak},
        "threads": 1,
        "parameters": 1000,
        "loss": 0.5,
        "grad_norm": 2.0,
        "others_share_of_machine_cpu": 0.01,
    } | changes


Play = Callable[..., list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Engines that are played; returns the names of those that were started, in order."""

    def begin(**changes: Any) -> list[str]:
        begun: list[str] = []

        def started(side: Side, *_: Any) -> list[dict[str, Any]]:
            begun.append(side.name)
            single = side.name == "single"
            other = {} if single else changes
            return [rank(1.0 if single else 1.5, 100.0 * (1 + number), **other) for number in range(side.ranks)]

        monkeypatch.setattr(trainer_engines, "run_side", started)
        return begun

    return begin


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["trainer_engines.py", *arguments])
    return trainer_engines.main()


def test_engines_take_turns_in_both_orders_and_are_compared_with_single(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun = play()
    assert bench(monkeypatch, "--model", str(tmp_path)) == 0
    names = [side.name for side in SIDES]
    assert begun == [*names, *reversed(names)]
    result = json.loads(capsys.readouterr().out)
    assert list(result["engines"]) == names
    assert result["engines"]["fsdp2"]["step_s"] == {"p50": 3.0, "p95": 4.5, "max": 4.5, "count": 6}
    assert result["engines"]["fsdp2"]["peak_rss_mb"]["load"] == [200.0, 400.0]
    ratio = result["ratio_to_single"]
    assert set(ratio) == {*names} - {"single"}
    assert (ratio["deepspeed-3"]["step_s"], ratio["deepspeed-3"]["peak_rss_train"]) == (1.5, 2.0)
    assert ratio["fsdp2-one-rank"]["peak_rss_train"] == 1.0
    assert (ratio["fsdp2"]["step_cpu_s"], ratio["fsdp2-one-rank"]["step_cpu_s"]) == (3.0, 1.5), "of all ranks"


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_an_engine_that_computes_something_else_is_no_result(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, what: str
) -> None:
    play(**{what: 1.9})
    assert bench(monkeypatch, "--quick", "--only", "fsdp2", "--model", str(tmp_path)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"fsdp2 has {what} 1.9 in its first step, single" in captured.err


def test_a_rank_is_measured_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = make_tiny_model(tmp_path / "model")
    plan = asdict(trainer_engines.QUICK) | {"model": str(model), "config": {**SIDES[0].config, "threads": 1}}
    trainer_rank.measure(json.loads(json.dumps(plan)), tmp_path)
    measured = json.loads((tmp_path / "rank-0.json").read_text()) | {"others_share_of_machine_cpu": 0.0}
    figures = trainer_engines.side_figures(SIDES[0], [[measured]])
    for part in (*trainer_engines.PARTS, "export", "save"):
        assert figures[f"{part}_s"]["p50"] > 0
    assert figures["step_s"]["p50"] >= figures["forward_s"]["p50"] + figures["backward_s"]["p50"]
    assert min(sizes[0] for sizes in figures["peak_rss_mb"].values()) > 50
    assert (tmp_path / "checkpoint" / "model" / "model.safetensors").is_file()


def test_a_rank_that_fails_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text("#!/bin/sh\necho EngineError: the model cannot be loaded\nexit 1\n")
    launcher.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(launcher))
    with pytest.raises(EngineFailedError, match=r"(?s)single failed: exit code 1\n.*the model cannot be loaded"):
        trainer_engines.run_side(SIDES[0], trainer_engines.QUICK, tmp_path, tmp_path)
