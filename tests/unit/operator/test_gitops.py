"""What docs/gitops.md and examples/gitops promise of Argo CD and kstatus, held against the status that is written."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from inflight_operator.crd import GROUP, build_crd
from inflight_operator.lifecycle import Cause, Plan, Trainer
from inflight_operator.reasons import REASONS
from inflight_operator.refusals import Refusal
from inflight_operator.status import Found, begun, new_status, troubled, wire
from inflight_runtime.api import KIND
from inflight_runtime.api.status import JobStatus, RoleStatus

ROOT = Path(__file__).resolve().parents[3]
ARGO_CD = ROOT / "examples" / "gitops" / "argo-cd"
GUIDE = ROOT / "docs" / "gitops.md"
SANDBOX = """
getmetatable("").__index = nil
string, math, io, debug, coroutine, python = nil, nil, nil, nil, nil, nil
"""
"""Argo CD runs the script with Lua's base, table, package and os only."""

NOW = datetime.datetime(2026, 5, 1, 12, 0, tzinfo=datetime.UTC)
GENERATION = 3
FROZEN = {"images": {}, "builder_revision": "1", "servers_at_start": 1, "actors_at_start": 1}
STARTED = begun(JobStatus(), NOW, FROZEN)
RUN = Plan("Pending", run=True)
ONE = RoleStatus(desired=1, ready=1)
ALL_READY = {"coordinator": ONE, "trainer": ONE, "inference": ONE, "actor": ONE}
NO_SERVER = ALL_READY | {"inference": RoleStatus(desired=1)}
TRAINS = Trainer(exists=True)


def told(found: Found, old: JobStatus = STARTED) -> JobStatus:
    return new_status("j", old, found, NOW)


def waits(reason: str, stalled: bool) -> JobStatus:
    return told(Found(RUN, GENERATION, {}, TRAINS, problem=Refusal(Cause(reason, "words"), stalled=stalled)))


RUNNING = told(Found(RUN, GENERATION, ALL_READY, TRAINS))
ROWS: dict[str, list[JobStatus]] = {
    "no operator has seen it, or not its last change": [
        JobStatus(observed_generation=0),
        told(Found(RUN, GENERATION - 1, ALL_READY, TRAINS)),
    ],
    "`Pending`, `Starting`": [
        told(Found(RUN, GENERATION, {}, waits_for_model=True)),
        told(Found(RUN, GENERATION, {}, TRAINS)),
    ],
    "`Pending` by what heals when somebody mends it (quota, image, storage)": [
        waits(name, stalled=False) for name, reason in REASONS.items() if reason.kind == "mend" and not reason.stalled
    ],
    "`Pending` by what no waiting cures (`InvalidSpec`, `InvalidPodTemplate`)": [
        told(Found(Plan("Pending"), GENERATION, invalid=Cause("InvalidSpec", "words")), JobStatus()),
        *(waits(name, stalled=True) for name, reason in REASONS.items() if reason.kind == "mend" and reason.stalled),
    ],
    "`Running`": [RUNNING],
    "`Running`, but a role has no ready pod": [
        told(Found(RUN, GENERATION, NO_SERVER, TRAINS, causes={"inference": Cause("Crashing", "words")}), RUNNING),
        troubled(RUNNING, Cause("InternalError", "words"), GENERATION, NOW),
    ],
    "`Suspending`, `Completing`": [
        told(Found(Plan("Suspending", waits_for="words"), GENERATION)),
        told(Found(Plan("Completing", waits_for="words"), GENERATION)),
    ],
    "`Suspended`": [
        told(Found(Plan("Suspended"), GENERATION)),
        told(Found(Plan("Suspended"), GENERATION), JobStatus()),
    ],
    "`Succeeded`": [told(Found(Plan("Succeeded"), GENERATION))],
    "`Failed`": [told(Found(Plan("Failed", failure=Cause("TrainerFailed", "words")), GENERATION))],
}


def health(status: JobStatus, **metadata: Any) -> tuple[str, str]:
    """What Argo CD would say of a job with this status."""
    config = yaml.safe_load((ARGO_CD / "argocd-cm.yaml").read_text())
    job = {"metadata": {"generation": GENERATION, **metadata}, "spec": {}, "status": wire(status)}
    lua = LuaRuntime(register_eval=False)
    lua.execute(SANDBOX)
    lua.globals().obj = lua.table_from(job, recursive=True)
    answer = lua.execute(config["data"][f"resource.customizations.health.{GROUP}_{KIND}"])
    return answer.status, answer.message


def table() -> dict[str, tuple[str, str]]:
    """The guide's table: conditions and health, by what is said of the job."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", GUIDE.read_text(), flags=re.MULTILINE)
    return {job: (conditions, state) for job, conditions, state in rows[1:]}


@pytest.mark.parametrize("row", ROWS)
def test_argo_cd_sees_what_the_guide_says(row: str) -> None:
    _, state = table()[row]
    assert ROWS[row]
    for status in ROWS[row]:
        assert health(status)[0] == state, wire(status)


@pytest.mark.parametrize("row", [row for row in ROWS if "no operator" not in row])
def test_the_conditions_are_those_that_the_guide_names(row: str) -> None:
    conditions, _ = table()[row]
    for status in ROWS[row]:
        true = {one.type for one in status.conditions if one.status == "True"} & {"Ready", "Reconciling", "Stalled"}
        assert {f"`{name}`" for name in true} == {conditions}


def test_the_guides_table_has_no_other_rows() -> None:
    assert set(table()) == {*ROWS, "being deleted"}


def test_a_job_that_is_being_deleted_is_not_what_it_was() -> None:
    assert table()["being deleted"][1] == "Progressing"
    for statuses in ROWS.values():
        for status in statuses:
            assert health(status, deletionTimestamp="2026-05-01T12:00:00Z") == ("Progressing", "is being deleted")


def test_the_message_is_the_reason_in_the_servers_own_words() -> None:
    assert health(waits("QuotaExceeded", stalled=False)) == ("Progressing", "QuotaExceeded: words")
    assert health(RUNNING) == ("Healthy", "Running")
    assert health(told(Found(Plan("Failed", failure=Cause("TrainerFailed", "words")), 3)))[1] == "TrainerFailed: words"


def test_a_progress_report_is_no_news_for_argo_cd() -> None:
    # Otherwise it would write its Application at every step.
    assert health(RUNNING.model_copy(update={"restarts": 1, "gpus": 8})) == health(RUNNING)


def test_the_application_ignores_fields_that_there_are() -> None:
    application = yaml.safe_load((ARGO_CD / "application.yaml").read_text())
    (ignored,) = application["spec"]["ignoreDifferences"]
    assert (ignored["group"], ignored["kind"]) == (GROUP, KIND)
    (version,) = build_crd()["spec"]["versions"]
    for pointer in ignored["jsonPointers"]:
        schema = version["schema"]["openAPIV3Schema"]
        for part in pointer.strip("/").split("/"):
            schema = schema["properties"][part]
    assert (ROOT / application["spec"]["source"]["path"] / "kustomization.yaml").is_file()


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text())
    assert links
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []
