"""``inflight status`` and ``inflight logs`` of jobs, as a user with the rights of a viewer types them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from control_plane.cluster import Cluster, end_pods, eventually
from control_plane.jobs import Jobs, job
from control_plane.links import Link
from control_plane.operator_process import ROOT, Coordinators, OperatorProcess, state
from inflight_operator.install.rbac import USER_ROLES
from inflight_runtime.cli import app
from inflight_runtime.cluster import connection, watching
from inflight_runtime.cluster import jobs as cluster_jobs
from inflight_runtime.cluster import status as cluster_status
from inflight_runtime.cluster.connection import ClusterError, Resource
from inflight_runtime.cluster.status import show_status
from inflight_runtime.target import Cluster as Target

DEADLINE_S = 60
PODS = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]
"""What the cluster's own role view has, of which a test below makes sure."""


def role_file(path: Path, rules: list[dict[str, Any]]) -> Path:
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "x"}}
    path.write_text(yaml.safe_dump({**role, "rules": rules}))
    return path


def read(kubeconfig: Path) -> Any:
    return yaml.safe_load(kubeconfig.read_text())


@pytest.fixture
def viewer(kubeconfig_for: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubeconfig of somebody who may look, in use."""
    rules = [rule.manifest() for rule in USER_ROLES["view"]]
    kubeconfig = kubeconfig_for(role_file(tmp_path / "view.yaml", [*rules, *PODS]))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return kubeconfig


def inflight(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refusal(*arguments: str) -> str:
    result = inflight(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("inflight: ")
    return result.stderr


@contextlib.contextmanager
def command(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """The command as a process of its own, and what it has said so far."""
    directory.mkdir()
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "inflight_runtime", *arguments], stdout=out, stderr=err, start_new_session=True
        )
    try:
        yield process, lambda: (directory / "out").read_text() + (directory / "err").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def test_a_viewer_follows_a_job_from_its_start_to_its_end(
    jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators, viewer: Path, tmp_path: Path
) -> None:
    namespace, key = jobs.namespace, f"{jobs.namespace}/sort-letters"
    coordinators.states[key] = state(step=17, reward=0.25)
    jobs.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / "sort-letters" / "job.yaml"))
    one = command(tmp_path / "one", "status", "sort-letters", "-n", namespace, "-w")
    everything = command(tmp_path / "all", "status", "-w", "-n", namespace)
    with one as (process, said), everything as (watching_all, said_of_all):
        eventually("step 17 is seen", lambda: "step 17/260" in said() and "step 17/260" in said_of_all(), DEADLINE_S)
        jobs.wait_phase("sort-letters", "Running")

        shown = inflight("status", "rltj/sort-letters", "-n", namespace).stdout
        assert "sort-letters  Running" in shown
        assert "step 17/260" in shown
        assert "reward 0.250" in shown
        assert "version 1.17" in shown
        assert [line.split()[:2] for line in shown.splitlines() if "inflight-runtime" in line] == [
            ["coordinator", "1/1"],
            ["inference", "2/2"],
            ["actor", "1/1"],
            ["trainer", "1/1"],
        ]
        row = inflight("status", "-n", namespace).stdout.splitlines()[1].split()
        assert row[:-1] == ["sort-letters", "Running", "17/260", "0.250", "2/2", "1/1", "1/1", "0"]

        watching_all.send_signal(signal.SIGINT)
        assert watching_all.wait(DEADLINE_S) == 130
        assert "Traceback" not in said_of_all()

        coordinators.states[key] = state(step=260, reward=0.9, outcome="succeeded")
        end_pods(jobs.kubectl, namespace, "inflight.dev/job=sort-letters,inflight.dev/role=trainer")
        assert process.wait(DEADLINE_S) == 0
        lines = said().splitlines()
    phases = list(dict.fromkeys(line.split("  ")[0] for line in lines))
    assert [phase for phase in phases if phase in ("Running", "Succeeded")] == ["Running", "Succeeded"]
    assert lines[-1].startswith("Succeeded  step 260/260  reward 0.900")


async def test_a_job_that_fails_and_one_that_is_deleted_end_the_watch(jobs: Jobs, viewer: Path) -> None:
    jobs.create(job("fails"), job("goes"))
    target, outputs = Target(namespace=jobs.namespace), {"fails": io.StringIO(), "goes": io.StringIO()}
    failed = {"type": "Failed", "status": "True", "reason": "TrainerFailed", "message": "out of memory"}
    times = {"lastTransitionTime": "2026-05-01T12:00:00Z", "observedGeneration": 1}
    status = {"phase": "Failed", "observedGeneration": 1, "conditions": [failed | times]}
    async with asyncio.timeout(DEADLINE_S):
        watches = [
            asyncio.create_task(show_status(target, name, Console(file=output), watch=True))
            for name, output in outputs.items()
        ]
        await asyncio.to_thread(
            eventually, "both are seen", lambda: all(output.getvalue() for output in outputs.values()), DEADLINE_S
        )
        patch = json.dumps({"status": status})
        run = ("patch", "rltj/fails", "-n", jobs.namespace, "--subresource=status", "--type=merge", "-p", patch)
        await asyncio.to_thread(jobs.kubectl, *run)
        await asyncio.to_thread(jobs.kubectl, "delete", "rltj/goes", "-n", jobs.namespace)
        assert await asyncio.gather(*watches) == [1, 1]
    assert outputs["fails"].getvalue().splitlines()[-1] == "Failed  Failed: TrainerFailed: out of memory"
    assert outputs["goes"].getvalue().splitlines() == ["not seen yet", "goes was deleted"]


async def test_a_link_that_is_cut_without_a_word_is_noticed_and_what_was_missed_is_shown(
    jobs: Jobs, viewer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CALL_DEADLINE_S", 2.0)
    monkeypatch.setattr(watching, "WATCH_S", 1)
    jobs.create(job("far"))
    document, output = read(viewer), io.StringIO()
    server = document["clusters"][0]["cluster"]
    with Link(server["server"]) as link:
        server["server"] = link.url
        (tmp_path / "far").write_text(yaml.safe_dump(document))
        target = Target(str(tmp_path / "far"), namespace=jobs.namespace)
        watch = asyncio.create_task(show_status(target, "far", Console(file=output, width=200), watch=True))

        async def said(text: str) -> None:
            await asyncio.to_thread(eventually, f"{text} is said", lambda: text in output.getvalue(), DEADLINE_S)

        await said("not seen yet")
        link.cut()
        patch = ("--subresource=status", "--type=merge", "-p", '{"status": {"phase": "Succeeded"}}')
        await asyncio.to_thread(jobs.kubectl, "patch", "rltj/far", "-n", jobs.namespace, *patch)
        await said("does not answer: ")
        link.mend()
        assert await asyncio.wait_for(watch, DEADLINE_S) == 0
    assert output.getvalue().splitlines()[-2:] == ["the API server answers again", "Succeeded"]


def test_what_stands_in_the_way_is_told_in_words(
    jobs: Jobs, viewer: Path, kubeconfig_for: Callable[[Path], Path], tmp_path: Path
) -> None:
    where = ("-n", jobs.namespace)
    assert inflight("status", *where).stdout.startswith(f"no jobs in namespace {jobs.namespace} of context ")
    jobs.create(job("sort-letters"))
    row = next(line for line in inflight("status", "-A").stdout.splitlines() if jobs.namespace in line)
    assert row.split()[:3] == [jobs.namespace, "sort-letters", "not"]

    assert "there is no job sort-leters in namespace" in (told := refusal("status", "sort-leters", *where))
    assert told.endswith("did you mean sort-letters?\n")
    assert "there are sort-letters\n" in refusal("status", "quite-another", "-w", *where)
    none = inflight("logs", "sort-letters", "trainer", *where)
    assert none.exit_code == 1
    assert none.stderr == "there is no pod of trainer at the moment; sort-letters is not seen yet\n"
    assert "actr is no role (coordinator, inference," in refusal("logs", "sort-letters", "actr", *where)

    assert "--context: there is no context kind in " in refusal("status", "--context", "kind")
    assert f"--kubeconfig: there is no file {tmp_path / 'no'}" in refusal(
        "status", "--kubeconfig", str(tmp_path / "no")
    )
    stranger = str(kubeconfig_for(role_file(tmp_path / "pods.yaml", PODS)))
    told = refusal("status", *where, "--kubeconfig", stranger)
    assert f"you may not list rltrainingjobs.inflight.dev in namespace {jobs.namespace}" in told
    assert "you may not get rltrainingjobs.inflight.dev" in refusal(
        "logs", "sort-letters", *where, "--kubeconfig", stranger
    )

    document = read(viewer)
    document["users"][0]["user"]["token"] = "none"
    wrong = tmp_path / "wrong"
    wrong.write_text(yaml.safe_dump(document))
    assert "does not accept the credentials" in refusal("status", *where, "--kubeconfig", str(wrong))
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    wrong.write_text(yaml.safe_dump(document))
    assert "(https://127.0.0.1:9) does not answer" in refusal("status", *where, "--kubeconfig", str(wrong))


def test_a_cluster_without_inflight_and_a_machine_without_a_cluster_say_so(
    cluster: Cluster, namespace: str, viewer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Resource("absent.inflight.dev/v1", "rltrainingjobs")
    monkeypatch.setattr(cluster_status, "JOBS", absent)
    monkeypatch.setattr(cluster_jobs, "JOBS", absent)
    for arguments in (("status",), ("status", "x"), ("status", "--kubeconfig", str(cluster.kubeconfig))):
        told = refusal(*arguments, "-n", namespace)
        assert "does not know rltrainingjobs.absent.inflight.dev: Inflight is not installed there" in told

    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "kubeconfig: there is no file ~/.kube/config" in refusal("status", "rltj")


def test_the_clusters_own_role_view_reads_pods_and_their_logs(cluster: Cluster) -> None:
    rules = cluster.kubectl.get("clusterrole/view")["rules"]
    for wanted in PODS:
        assert any(
            {*wanted["resources"]} <= {*rule["resources"]} and {*wanted["verbs"]} <= {*rule["verbs"]} for rule in rules
        )


async def test_a_name_needs_one_namespace(viewer: Path) -> None:
    with pytest.raises(ClusterError, match="name it by -n"):
        await show_status(Target(all_namespaces=True), "x", Console(file=io.StringIO()), watch=False)
