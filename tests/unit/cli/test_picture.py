"""How a job in a cluster is shown: the picture, one line, the table."""

import datetime
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from inflight_runtime.cluster.connection import ClusterError
from inflight_runtime.cluster.jobs import Job, read_job
from inflight_runtime.cluster.picture import age_text, picture, plain_line, table
from inflight_runtime.cluster.status import Pace, Screen

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
NOW = datetime.datetime(2026, 5, 1, 12, 0, tzinfo=datetime.UTC)
PROGRESS = {
    "step": 57,
    "steps": 260,
    "policyVersion": {"epoch": 1, "step": 56},
    "rewardMean": 0.6134,
    "stalenessMean": 1.25,
    "tokensPerSecond": 4321.4,
    "groupsTrained": 912,
    "groupsDropped": 3,
    "checkpointStep": 50,
}
READY = [
    {"type": "Validated", "status": "True", "reason": "Valid", "message": ""},
    {"type": "InferenceReady", "status": "True", "reason": "Ready", "message": "2 of 2 ready"},
    {"type": "Suspended", "status": "False", "reason": "NotSuspended", "message": ""},
    {"type": "Ready", "status": "True", "reason": "Running", "message": ""},
]
RUNNING = {
    "phase": "Running",
    "starts": 1,
    "restarts": 2,
    "activeSeconds": 60,
    "activeSince": "2026-05-01T11:59:35Z",
    "coordinator": {"desired": 1, "ready": 1},
    "inference": {"desired": 2, "ready": 2},
    "actors": {"desired": 1, "ready": 1},
    "trainer": {"desired": 1, "ready": 1},
    "images": {"inference": "registry.example.org/runtime:1"},
    "progress": PROGRESS,
    "conditions": READY,
}
QUOTA = "exceeded quota: team,\n  requested: cpu=2"


def job(status: dict[str, Any] | None, **spec: Any) -> Job:
    metadata = {
        "name": "sort-letters",
        "namespace": "team",
        "uid": "u",
        "creationTimestamp": "2026-05-01T11:00:00Z",
    }
    raw: dict[str, Any] = {"metadata": metadata, "spec": {"algorithm": {"steps": 260}, **spec}}
    return read_job(raw if status is None else raw | {"status": status})


def pending(**changes: Any) -> Job:
    conditions = [
        {"type": "Validated", "status": "True", "reason": "Valid"},
        {"type": "ResourcesCreated", "status": "False", "reason": "QuotaExceeded", "message": QUOTA},
        {"type": "InferenceReady", "status": "False", "reason": "NotCreated"},
        {"type": "Ready", "status": "False", "reason": "QuotaExceeded", "message": QUOTA},
        {"type": "Reconciling", "status": "True", "reason": "QuotaExceeded", "message": QUOTA},
    ]
    return job({"phase": "Pending", "starts": 1, "conditions": conditions, **changes})


def lines_of(shown: Any, width: int = 160) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width).print(shown)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_running_job_looks_as_a_local_run_does() -> None:
    lines = lines_of(picture(job(RUNNING), "namespace team, context kind", NOW, 4.0))
    assert lines[0] == "sort-letters  Running  1:25"
    assert lines[1].endswith("step 57/260  22%  0:51 left")
    assert lines[2:4] == [
        "  reward 0.613   staleness 1.25   steps/s 4.00   tokens/s 4,321   version 1.56",
        "  groups 912 trained   dropped 3   checkpoint of step 50",
    ]
    assert [line.split() for line in lines[4:9]] == [
        ["role", "ready", "restarts", "image"],
        ["coordinator", "1/1"],
        ["inference", "2/2", "registry.example.org/runtime:1"],
        ["actor", "1/1"],
        ["trainer", "1/1", "2"],
    ]
    assert lines[9:] == ["  namespace team, context kind"]


def test_the_page_shows_what_is_shown() -> None:
    page = re.findall(r"^\$ inflight (\S+)[^\n]*\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    jobs = [job(RUNNING), replace(pending(), name="sums")]
    shown = [picture(jobs[0], "namespace team, context kind", NOW), table(jobs, NOW)]
    assert [lines.splitlines() for _, lines in page] == [
        lines_of(one, width) for one, width in zip(shown, (90, 160), strict=True)
    ]


def test_what_is_in_the_way_is_told_once_with_reason_and_message() -> None:
    lines = lines_of(picture(pending(), "place", NOW))
    told = [line for line in lines if "QuotaExceeded" in line]
    assert told == ["  ResourcesCreated: QuotaExceeded: exceeded quota: team, requested: cpu=2"]
    assert not any("NotCreated" in line for line in lines)


def test_a_job_that_no_waiting_helps_and_one_that_nobody_has_looked_at_say_so() -> None:
    stalled = {"type": "Stalled", "status": "True", "reason": "InvalidSpec", "message": "no"}
    lines = lines_of(picture(job({"phase": "Pending", "conditions": [stalled]}), "place", NOW))
    assert "  no waiting helps: somebody has to change the job" in lines
    for status in (None, {"observedGeneration": 0}):
        lines = lines_of(picture(job(status), "place", NOW))
        assert lines == ["sort-letters  not seen yet  0:00", "  no operator has looked at it yet", "  place"]


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Completing"])
def test_roles_that_are_gone_because_of_the_phase_are_no_trouble(phase: str) -> None:
    reason = "Suspended" if phase == "Suspended" else "Finished"
    conditions = [{"type": kind, "status": "False", "reason": reason} for kind in ("InferenceReady", "TrainerRunning")]
    conditions.append({"type": "Ready", "status": "False" if phase == "Completing" else "True", "reason": phase})
    assert job({"phase": phase, "conditions": conditions}).troubles == []


def test_a_failed_job_says_why_and_its_clock_stands_still() -> None:
    conditions = [
        {"type": "TrainerRunning", "status": "False", "reason": "Failed"},
        {"type": "Failed", "status": "True", "reason": "TrainerFailed", "message": "out of memory"},
        {"type": "Ready", "status": "False", "reason": "TrainerFailed", "message": "out of memory"},
        {"type": "Stalled", "status": "True", "reason": "TrainerFailed", "message": "out of memory"},
    ]
    status = {**RUNNING, "phase": "Failed", "conditions": conditions, "completionTime": "2026-05-01T11:59:45Z"}
    lines = lines_of(picture(job(status), "place", NOW))
    assert lines[0] == "sort-letters  Failed  1:10"
    assert sum("out of memory" in line for line in lines) == 1
    assert "Failed: TrainerFailed: out of memory" in plain_line(job(status))


def test_one_line_holds_what_one_wants_to_know() -> None:
    assert plain_line(job(RUNNING), 4.0) == (
        "Running  step 57/260  reward 0.613  staleness 1.25  steps/s 4.00  tokens/s 4,321  version 1.56  servers 2/2  "
        "about 0:51 left  restarts 2"
    )
    assert plain_line(pending()) == (
        "Pending  servers 0/0  ResourcesCreated: QuotaExceeded: exceeded quota: team, requested: cpu=2"
    )
    assert plain_line(job(None)) == "not seen yet"


def test_words_from_elsewhere_move_no_cursor() -> None:
    conditions = [{"type": "InferenceReady", "status": "False", "reason": "Crash", "message": "\x1b[2Jgone"}]
    assert "\x1b" not in plain_line(job({**RUNNING, "conditions": conditions}))


def test_the_table_has_a_row_for_each_job() -> None:
    lines = [line.split() for line in lines_of(table([job(RUNNING), pending()], NOW))]
    assert lines == [
        ["NAME", "PHASE", "STEP", "REWARD", "INFERENCE", "ACTORS", "TRAINER", "RESTARTS", "AGE", "REASON"],
        ["sort-letters", "Running", "57/260", "0.613", "2/2", "1/1", "1/1", "2", "60m"],
        ["sort-letters", "Pending", "0/0", "0/0", "0/0", "0", "60m", "QuotaExceeded"],
    ]
    assert lines_of(table([pending()], NOW, namespaces=True))[0].startswith("NAMESPACE")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (119, "119s"), (121, "2m"), (7300, "2h"), (200000, "2d")])
def test_ages_are_short(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_a_status_of_another_version_is_told_and_a_field_too_many_is_passed_over() -> None:
    assert job({**RUNNING, "later": {"more": 1}}).phase == "Running"
    with pytest.raises(ClusterError, match="status of sort-letters was written by another version"):
        job({"phase": "Levitating"})


def test_the_pace_is_known_after_three_numbers_and_forgets_what_was_rolled_back() -> None:
    pace = Pace()
    assert [pace.steps_per_s(step, now) for step, now in ((10, 0.0), (10, 1.0), (14, 2.0))] == [None, None, None]
    assert pace.steps_per_s(18, 4.0) == 2.0
    assert pace.steps_per_s(12, 5.0) is None


def test_on_a_terminal_the_picture_is_drawn_in_place_with_events_above_it() -> None:
    output = io.StringIO()
    with Screen(Console(file=output, width=100, force_terminal=True)) as screen:
        assert screen.draws
        screen.draw(picture(job(RUNNING), "place", NOW))
        screen.event("the API server answers again")
        screen.draw(picture(pending(), "place", NOW))
    text = output.getvalue()
    assert text.index("Running") < text.index("answers again") < text.index("QuotaExceeded")
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_without_a_terminal_a_change_of_phase_is_told_at_once_and_numbers_now_and_then() -> None:
    output = io.StringIO()
    with Screen(Console(file=output, width=40)) as screen:
        assert not screen.draws
        for line, phase in (("a 1", "a"), ("a 1", "a"), ("a 2", "a"), ("b [bold]3", "b")):
            screen.line("job", line, phase)
        screen.line("other", "a 1", "a")
    assert output.getvalue().splitlines() == ["a 1", "b [bold]3", "a 1"]
