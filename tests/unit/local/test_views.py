"""What a person sees: plain lines, the live picture, the closing summary, rollouts."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from inflight_runtime.local.result import RunResult
from inflight_runtime.local.rundir import RunDirectory, RunRecord
from inflight_runtime.local.samples import choose, render_groups
from inflight_runtime.local.snapshot import Snapshot, Tracker
from inflight_runtime.local.status import render_status
from inflight_runtime.local.summary import percentile, render_summary, surviving, trend
from inflight_runtime.local.supervisor import RoleStatus
from inflight_runtime.local.text import clock_text, plain_text
from inflight_runtime.local.view import LiveView, PlainView, make_view, picture, plain_line
from inflight_runtime.protocol import Member, RunState, VersionField


def state(step: int = 120, **changes: Any) -> RunState:
    version = VersionField(epoch=1, step=step)
    member = Member(
        server_id="inference-0",
        boot_id="b",
        url="u",
        engine="vllm",
        world_size=1,
        capacity=64,
        max_length=128,
        state="UPDATING",
        version=VersionField(epoch=1, step=119),
        running=32,
        waiting=3,
        last_pause_ms=8.2,
        last_update_ms=21.4,
    )
    values: dict[str, Any] = {
        "job": "sort-letters",
        "outcome": "running",
        "epoch": 1,
        "step": step,
        "steps": 300,
        "policy_version": version,
        "groups": {"leased": 16, "completed": 3, "assigned": 5},
        "dropped": {},
        "attempts_failed": 0,
        "duplicates": 0,
        "fenced": 0,
        "leases_expired": 0,
        "capacity": {"outstanding": 24, "bound": 80, "leased": 16, "cap": 16},
        "metrics": {
            "reward_mean": 0.8214,
            "reward/exact": 0.7604,
            "staleness_mean": 1.25,
            "tokens_per_second": 4321.4,
        },
        "members": [member],
    }
    return RunState(**{**values, **changes})


def text_of(renderable: Any, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_line_holds_what_one_wants_to_know() -> None:
    snapshot = Snapshot("sort-letters", "training", 42.0, state(), 0.1, 4.5)
    assert plain_line(snapshot) == (
        "step 120/300  reward 0.821  exact 0.760  staleness 1.25  steps/s 4.50  tokens/s 4,321  "
        "servers 1/1 at v120  about 0:40 left"
    )


def test_a_plain_line_tells_restarts_and_a_silent_coordinator_and_leaves_out_what_is_not_known() -> None:
    roles = (RoleStatus("trainer", "trainer", "ready", 1, 2),)
    bare = state(0, metrics={"reward_mean": float("nan")}, members=[])
    snapshot = Snapshot("sort-letters", "training", 42.0, bare, 7.0, None, roles)
    expected = "step 0/300  servers 0/0 at v0  restarts trainer 2  (coordinator silent for 7 s)"
    assert plain_line(snapshot) == expected


def plain_view() -> tuple[PlainView, Clock, io.StringIO]:
    clock, output = Clock(), io.StringIO()
    return PlainView(Console(file=output, width=40), every_s=5.0, clock=clock), clock, output


def test_plain_lines_come_every_few_seconds_and_not_twice_the_same() -> None:
    view, clock, output = plain_view()
    for second in range(11):
        clock.now = 100.0 + second
        view.show(Snapshot("job", "training", float(second), state(step=min(second, 7))))
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["[0:00] step 0/300", "[0:05] step 5/300", "[0:10] step 7/300"]
    clock.now = 120.0
    view.show(Snapshot("job", "training", 20.0, state(step=7)))
    assert len(output.getvalue().splitlines()) == 3


def test_the_last_step_is_told_even_when_it_is_not_time_for_a_line() -> None:
    view, _, output = plain_view()
    view.show(Snapshot("job", "training", 0.0, state(step=1)))
    view.show(Snapshot("job", "training", 0.1, state(step=300)))
    view.show(Snapshot("job", "stopping", 0.2, state(step=300)))
    view.show(Snapshot("job", "succeeded", 0.3, state(step=300)))
    steps = [line.split("  ")[0] for line in output.getvalue().splitlines()]
    assert steps == ["[0:00] step 1/300", "[0:00] step 300/300"]


def test_events_are_whole_lines_without_markup_or_control_characters() -> None:
    view, clock, output = plain_view()
    clock.now += 65
    view.event("inference-0: [bold]ended[/bold] with exit code 1\x1b[2J; restart 1 of 5 in 0.2 s")
    assert output.getvalue() == (
        "[1:05] inference-0: [bold]ended[/bold] with exit code 1 [2J; restart 1 of 5 in 0.2 s\n"
    )


def test_the_view_is_live_on_a_terminal_only_and_plain_on_demand() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_view(terminal), LiveView)
    assert isinstance(make_view(terminal, plain=True), PlainView)
    assert isinstance(make_view(dumb), PlainView)
    assert isinstance(make_view(Console(file=io.StringIO())), PlainView)


def test_the_picture_shows_progress_numbers_groups_servers_and_processes() -> None:
    roles = (
        RoleStatus("coordinator", "coordinator", "ready", 1),
        RoleStatus("inference-0", "inference", "ready", 2, 1),
        RoleStatus("inference-1", "inference", "starting", 3),
        RoleStatus("trainer", "trainer", "restarting", None, 1, "was ended by SIGKILL"),
    )
    evaluation = {"step": 100.0, "attempts": 64.0, "attempts_failed": 0.0, "reward_mean": 0.9, "exact": 0.875}
    shown = state(dropped={"prompt_too_long": 2}, steps_skipped=3, evaluation=evaluation)
    lines = text_of(picture(Snapshot("sort-letters", "training", 42.0, shown, 0.1, 4.5, roles))).splitlines()
    assert lines[0] == "sort-letters  training  0:42"
    assert lines[1].endswith("step 120/300  40%  0:40 left")
    assert " ".join(lines[2].split()) == "reward 0.821 exact 0.760 staleness 1.25 steps/s 4.50 tokens/s 4,321"
    assert " ".join(lines[3].split()) == "held-out at step 100 reward 0.900 exact 0.875"
    assert lines[4] == "  groups 16 generating, 8 waiting (at most 80 together)   dropped 2   steps skipped 3"
    assert " ".join(lines[5].split()) == "server state version pause update generating note"
    assert " ".join(lines[6].split()) == "inference-0 UPDATING 1.119 8 ms 21 ms 32+3/64 1 restarts"
    assert " ".join(lines[7].split()) == "inference-1 starting - - - - starting"
    assert lines[8] == "  coordinator ready   trainer restarting (1 restarts)"


def test_the_picture_fits_a_narrow_terminal_and_a_run_that_has_just_begun() -> None:
    begun = picture(Snapshot("sort-letters", "starting", 0.4))
    assert text_of(begun).startswith("sort-letters  starting  0:00")
    long = state(members=[state().members[0].model_copy(update={"reason": "x" * 300})])
    for line in text_of(picture(Snapshot("sort-letters", "training", 1.0, long)), width=60).splitlines():
        assert len(line) <= 60


def test_rates_are_over_the_last_seconds_and_start_anew_after_a_rollback() -> None:
    clock = Clock()
    tracker = Tracker("job", clock)
    assert tracker.snapshot().steps_per_s is None
    for second in range(21):
        clock.now = 100.0 + second
        tracker.answered(state(step=second * (1 if second <= 10 else 3)))
    assert tracker.snapshot().steps_per_s == pytest.approx((60 - 10) / 10)
    tracker.answered(state(step=5))
    assert tracker.snapshot().steps_per_s is None
    assert tracker.snapshot().step == 5
    clock.now += 4
    assert tracker.snapshot().silent_s == 4


@given(st.integers(min_value=0, max_value=10_000_000))
def test_clock_texts_count_what_they_say(seconds: int) -> None:
    parts = [int(part) for part in clock_text(seconds).split(":")]
    assert sum(part * 60**power for power, part in enumerate(reversed(parts))) == seconds


def test_plain_text_keeps_letters_of_all_scripts_and_takes_out_what_a_terminal_would_obey() -> None:
    assert plain_text("größer 数\x1b]0;title\x07\r\nnext") == "größer 数 ]0;title  \nnext"


# --- summary ----------------------------------------------------------------------------------------------------------


def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("runs/one"))
    directory.create("spec", RunRecord("sort-letters", "/job.yaml", ()))
    steps = [{"step": step, "reward_mean": step / 100, "reward/exact": step / 200} for step in range(1, 101)]
    lost = [{"step": 50, "reward_mean": 100.0, "reward/exact": 100.0}]
    lines = steps[:49] + lost + steps[49:]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 101, "rew')
    updates = [{"update_ms": float(number), "ok": True} for number in range(1, 101)]
    failed = [{"update_ms": None, "ok": False}, {"update_ms": 9e9, "ok": False}]
    directory.updates.write_text("".join(json.dumps(line) + "\n" for line in updates + failed))
    (directory.checkpoints / "step-00000100").mkdir()
    (directory.checkpoints / "LATEST").write_text("step-00000100\n")
    return directory


def test_the_summary_says_how_it_went_where_everything_is_and_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = finished_run(tmp_path, monkeypatch)
    result = RunResult("succeeded", 0, "", state(step=300, outcome="succeeded"), {"trainer": 1}, 75.0)
    lines = [line.strip() for line in text_of(render_summary(result, directory)).splitlines()]
    assert lines[1:] == [
        "sort-letters: succeeded",
        "steps          300 of 300 in 1:15, 4.00 steps/s start-up included",
        "reward         0.055 over the first steps, 0.955 over the last",
        "exact        0.028, 0.478",
        "weight update  50 ms (median), 95 ms (95th percentile)",
        "restarts       trainer 1",
        "checkpoint     runs/one/checkpoints/step-00000100",
        "rollouts       runs/one/rollouts.jsonl",
        "logs           runs/one/logs",
        "next: inflight samples runs/one --best",
    ]


def test_the_summary_of_a_failed_run_has_the_reason_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("runs/one"))
    directory.create("spec", RunRecord("sort-letters", "/job.yaml", ()))
    result = RunResult("failed", 1, "inference-0: ended with exit code 1\n  | last line [x]", None, {}, 3.0)
    text = text_of(render_summary(result, directory))
    assert "one: failed\ninference-0: ended with exit code 1\n  | last line [x]\n" in text
    assert text.endswith("next: inflight run --resume runs/one\n")


def test_a_run_that_was_declared_failed_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("runs/one"))
    directory.create("spec", RunRecord("sort-letters", str(tmp_path / "job.yaml"), ()))
    declared = state(outcome="failed", reason="the environment always raises")
    result = RunResult("failed", 1, declared.reason, declared, {}, 3.0)
    assert text_of(render_summary(result, directory)).endswith("next: mend the cause, then inflight run job.yaml\n")
    record = directory.read_record()
    directory.write_record(replace(record, outcome=result.outcome, reason=result.reason))
    assert "sort-letters  failed  runs/one\n  the environment always raises\n" in text_of(render_status(directory))


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1), st.floats(min_value=0.01, max_value=1))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert all(sum(other <= value for other in values) < share * len(values) for value in values if value < found)


def test_trends_leave_out_what_is_not_a_number() -> None:
    assert trend([], "reward_mean") is None
    assert percentile([], 0.5) is None
    records = surviving([{"step": 2, "r": 3.0}, {"step": 1, "r": None}, {"no": 1}, {"step": 3, "r": 5.0}])
    found = trend(records, "r")
    assert found is not None
    assert (found.first, found.last) == (3.0, 5.0)


# --- samples ----------------------------------------------------------------------------------------------------------


def attempt(step: int, group: int, number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": group,
        "attempt": number,
        "problem": group % 10,
        "prompt": f"sort:{group}",
        "text": f"answer {number}",
        "reward": reward,
        "parts": {},
        "versions": ["1.3"],
        "status": "ok",
        "finish": "stop",
    } | more


def ids(groups: list[list[dict[str, Any]]]) -> list[int]:
    return [group[0]["group"] for group in groups]


def test_answers_to_one_prompt_stand_together_best_first_and_failed_ones_last() -> None:
    records = [attempt(1, 7, 0, 0.2), attempt(1, 7, 1, 0.9), attempt(1, 7, 2, 0.0, status="failed", error="boom")]
    [group] = choose(records, step=None, choice="newest", count=3)
    assert [record["attempt"] for record in group] == [1, 0, 2]


def test_groups_are_chosen_by_age_by_their_best_or_by_their_worst_answer() -> None:
    rewards = {1: (0.5, 0.4), 2: (1.0, 0.9), 3: (0.6, 0.0), 4: (0.7, 0.7)}
    records = [
        attempt(group // 2 + 1, group, number, reward)
        for group, pair in rewards.items()
        for number, reward in enumerate(pair)
    ]
    assert ids(choose(records, step=None, choice="newest", count=2)) == [4, 2]
    assert ids(choose(records, step=None, choice="best", count=2)) == [2, 4]
    assert ids(choose(records, step=None, choice="worst", count=2)) == [3, 1]
    assert ids(choose(records, step=2, choice="best", count=9)) == [2, 3]


def test_a_step_that_was_trained_again_is_shown_once_as_it_survived() -> None:
    records = [attempt(1, 7, 0, 0.2, text="lost"), attempt(1, 7, 0, 0.8, text="kept")]
    [[record]] = choose(records, step=None, choice="newest", count=3)
    assert record["text"] == "kept"


def test_rollouts_read_well() -> None:
    group = [
        attempt(12, 7, 1, 1.0, parts={"exact": 1.0}, versions=["1.9", "1.10", "1.11"], text="a\nb [c]"),
        attempt(12, 7, 0, -0.25, finish="length", text=""),
        attempt(12, 7, 2, 0.0, status="failed", error="TimeoutError: 600 s"),
    ]
    lines = [line.rstrip() for line in text_of(render_groups([group])).splitlines()]
    assert lines == [
        "step 12, group 7, problem 7   3 answers, mean reward 0.375",
        "  sort:7",
        "   1.000  a",
        "          b [c]   [exact 1, v1.9..1.11]",
        "  -0.250  (empty)   [v1.3, cut at maxTokens]",
        "  failed  TimeoutError: 600 s",
        "",
    ]
