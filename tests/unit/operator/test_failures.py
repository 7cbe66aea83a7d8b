"""docs/failures.md knows every phase, condition and reason, and sends nobody to what is not there."""

from __future__ import annotations

import datetime
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from inflight_operator import names
from inflight_operator.install.deployment import NAMESPACE, operator_labels
from inflight_operator.lifecycle import Cause, Plan, Trainer
from inflight_operator.progress import Reading
from inflight_operator.reasons import REASONS
from inflight_operator.refusals import Refusal
from inflight_operator.status import Found, begun, new_status
from inflight_runtime.api.enums import Phase
from inflight_runtime.api.status import JobStatus, RoleStatus
from support.cluster_jobs import children, make_job

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "failures.md"
TEXT = GUIDE.read_text()
TOGETHER = re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)
PASSING = "Reasons that pass"
NORMAL = "Reasons of a normal run"
PATTERN = re.compile(r"^\| `([^`]+)` \| (.*?) \|(?: (.*) \|)?$", flags=re.MULTILINE)
NOW = datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC)


def chapter(title: str) -> str:
    """The text under a heading."""
    assert title in TOGETHER
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """What the tables of a chapter say of each word."""
    return {word: meaning for word, meaning, _ in PATTERN.findall(chapter(title))}


def sections() -> dict[str, str]:
    """The text of each reason that has a section of its own."""
    return dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n##|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def commands() -> list[str]:
    """Every command in the guide, of blocks and of tables."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in [*lines, *re.findall(r"`(kubectl [^`]+)`", TEXT)] if "kubectl" in line]


def test_every_reason_has_its_place() -> None:
    told = {**rows(NORMAL), **rows(PASSING), **sections()}
    assert set(told) == set(REASONS)
    assert {name for name in told if REASONS[name].kind in ("mend", "over")} == set(sections())
    assert {name for name in told if REASONS[name].kind == "waits"} == set(rows(PASSING))


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_means_here_what_it_means_in_the_code(name: str) -> None:
    told = {**rows(NORMAL), **rows(PASSING), **sections()}[name]
    assert told.partition("\n")[0] == REASONS[name].meaning


@pytest.mark.parametrize("name", [name for name, reason in REASONS.items() if reason.kind in ("mend", "over")])
def test_who_has_to_mend_something_is_given_a_command(name: str) -> None:
    said = sections()[name]
    assert "kubectl" in said or "the four commands above" in said


def test_every_phase_and_condition_has_its_row() -> None:
    assert set(rows("Phases")) == set(get_args(Phase))
    assert set(rows("Conditions")) == conditions()


def conditions() -> set[str]:
    """Types of all conditions that a status can have."""
    started = begun(
        JobStatus(), NOW, {"images": {}, "builder_revision": "", "servers_at_start": 1, "actors_at_start": 1}
    )
    one = RoleStatus(desired=1, ready=1)
    counts = dict.fromkeys(names.ROLES, one)
    found = [
        Found(Plan("Pending", run=True), 1, counts, Trainer(exists=True), reading=Reading(None, error="gone")),
        Found(Plan("Pending", run=True), 1, problem=Refusal(Cause("NameTaken", ""), stalled=True)),
        Found(Plan("Pending", run=True), 1),
        Found(Plan("Succeeded"), 1),
        Found(Plan("Failed", failure=Cause("TrainerFailed", "")), 1),
    ]
    return {condition.type for each in found for condition in new_status("j", started, each, NOW).conditions}


def test_the_commands_name_what_there_is() -> None:
    found = " ".join(commands())
    assert len(commands()) > 50
    roles = {*names.ROLES, names.MODEL}
    assert set(re.findall(rf"{re.escape(names.ROLE_LABEL)}=(\w+)", found)) <= roles
    assert set(re.findall(r"(inflight\.dev/[a-z-]+)=", found)) == {names.JOB_LABEL, names.ROLE_LABEL}
    assert set(re.findall(r"-n (inflight-[a-z]+)", found)) == {NAMESPACE}
    assert set(re.findall(r"(app\.kubernetes\.io/\w+)=(\w+)", found)) == set(operator_labels().items())
    job = make_job("j", model={"source": "example-org/model-1b"})
    made = {child.name.removeprefix("j") for child in children(job)} | {"-coordinator-0"}
    assert set(re.findall(r"\$J(-[a-z0-9-]+)", found)) <= made


def test_the_commands_can_be_typed_as_they_are() -> None:
    for line in commands():
        words = shlex.split(line, comments=True)
        # Job and namespace are always said, but of what belongs to no job.
        assert "-n" in words or not {"rltj", "pvc", "pods", "logs"} & set(words) or "-A" in words, line
        assert "kubectl" in words


def test_links_lead_somewhere() -> None:
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in TOGETHER}
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert not path or (GUIDE.parent / path).exists(), target
        assert path or anchor in anchors, target
