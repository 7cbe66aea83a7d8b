"""What the docs show of kubectl is what kubectl shows. ``INFLIGHT_WRITE_DOCS=1`` writes the outputs anew."""

from __future__ import annotations

import os
import re
import shlex

import pytest

from control_plane.cluster import Cluster, KubectlError
from control_plane.jobs import Jobs
from control_plane.operator_process import ROOT, Coordinators, OperatorProcess, state

PAGES = {"operator.md": ["get", "get"], "kubectl.md": ["describe", "explain"]}
DRY_RUN = ("delete", "label", "patch", "scale")
"""Verbs of the failure guide that the API server is asked to try only."""
WRITE = os.environ.get("INFLIGHT_WRITE_DOCS") == "1"
COMMAND = re.compile(r"^\$ kubectl ((?:get|describe|explain) [^\n]*)\n(.*?)(?=^\$ |^```)", re.MULTILINE | re.DOTALL)
VOLATILE = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "TIME"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"Resource Version: +\d+"), "Resource Version: N"),
    (re.compile(r"Namespace: +\S+"), "Namespace: NAMESPACE"),
    (re.compile(r"(?<![\w-])(\d+[hms])+(?![\w-])"), "AGE"),
    (re.compile(r" +"), " "),
)


def steady(text: str, namespace: str) -> set[str]:
    """The lines of an output, without what differs from one cluster and moment to another."""
    text = text.replace(f".{namespace}.svc", ".default.svc")
    for pattern, name in VOLATILE:
        text = pattern.sub(name, text)
    return {line.strip() for line in text.splitlines()}


@pytest.fixture
def running_example(
    cluster: Cluster, jobs: Jobs, operator: OperatorProcess, coordinators: Coordinators
) -> tuple[Cluster, str]:
    """The example, running, with some progress."""
    coordinators.states[f"{jobs.namespace}/sort-letters"] = state(step=57, reward=0.613)
    cluster.kubectl("apply", "-n", jobs.namespace, "-f", str(ROOT / "examples" / "sort-letters" / "job.yaml"))
    jobs.wait_phase("sort-letters", "Running")
    jobs.eventually("progress is told", lambda: jobs.status("sort-letters").get("progress"))
    return cluster, jobs.namespace


def test_kubectl_shows_what_the_pages_say(running_example: tuple[Cluster, str]) -> None:
    cluster, namespace = running_example
    for page, wanted in PAGES.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        commands = COMMAND.findall(text)
        assert [command.split()[0] for command, _ in commands] == wanted
        for command, shown in commands:
            real = cluster.kubectl(*command.split(), "-n", namespace)
            if WRITE:
                real = "".join(f"{line.rstrip()}\n" for line in real.replace(namespace, "default").splitlines())
                text = text.replace(f"$ kubectl {command}\n{shown}", f"$ kubectl {command}\n{real}")
                continue
            assert steady(shown, "default") == steady(real, namespace), f"kubectl {command}: set INFLIGHT_WRITE_DOCS=1"
        if WRITE:
            (ROOT / "docs" / page).write_text(text, encoding="utf-8")


def test_kubectl_and_the_api_server_understand_the_commands_of_the_failure_guide(
    running_example: tuple[Cluster, str],
) -> None:
    cluster, namespace = running_example
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    commands = dict.fromkeys(re.findall(r"^(?:\$ )?kubectl [^`|#\n]+|(?<=`)kubectl [^`|]+", text, flags=re.MULTILINE))
    tried = 0
    for command in commands:
        filled = command.removeprefix("$ ").replace("$J", "sort-letters").replace("$N", namespace)
        verb, *arguments = shlex.split(filled)[1:]
        # A blank to fill in, or what only an installed operator has.
        if "<" in filled or "inflight-system" in filled:
            continue
        if verb == "logs":
            # No fake node has logs; the flags are read before that is found out.
            with pytest.raises(KubectlError, match=r"(?i)error from server"):
                cluster.kubectl(verb, *arguments)
        elif verb in ("get", "describe", "api-resources", *DRY_RUN):
            cluster.kubectl(verb, *arguments, *(["--dry-run=server"] if verb in DRY_RUN else []))
        else:
            continue
        tried += 1
    assert tried > 35
