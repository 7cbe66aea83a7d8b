"""The operator as a process of its own, acting as a service account with exactly the rights that are shipped."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from control_plane.cluster import AuditEvent, Cluster, eventually
from inflight_operator import names

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_ROLE = ROOT / "manifests" / "cluster" / "cluster_role.yaml"
STOP_DEADLINE_S = 20.0
NEWER_IMAGES = "example.org"
NEWER = """
import sys
from inflight_operator import builders
from inflight_operator.builders import actors, build, wiring
for module in (builders, build):
    module.BUILDER_REVISION = "next"
import inflight_operator.reconciler
inflight_operator.reconciler.BUILDER_REVISION = "next"
actors.ACTOR_PORT = wiring.ACTOR_PORT = 7777  # in the role configs and in a pod template
from inflight_operator.__main__ import main
sys.exit(main())
"""


class OperatorProcess:
    """``python -m inflight_operator``, started, killed and started again at will.

    Args:
        kubeconfig: whom it acts as.
        directory: where its log goes.
        environment: settings (``INFLIGHT_...``).

    Attributes:
        user: who it is to the API server.
        program: what Python is asked to run.
    """

    def __init__(self, kubeconfig: Path, directory: Path, environment: dict[str, str], user: str = "") -> None:
        self.user = user
        self.program: tuple[str, ...] = ("-m", "inflight_operator")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_")},
            "KUBECONFIG": str(kubeconfig),
            "INFLIGHT_HTTP_HOST": "127.0.0.1",
            "INFLIGHT_HTTP_PORT": "0",
            "INFLIGHT_LOG_FORMAT": "text",
            **environment,
        }
        self._directory = directory
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Everything that all of its lives have logged."""
        files = sorted(self._directory.glob("operator-*.log"))
        return "".join(file.read_text(errors="replace") for file in files)

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def port(self) -> int:
        """Port of its probes and metrics."""
        lines = [line for line in self.log.splitlines() if "probes and metrics on port" in line]
        return int(lines[-1].rpartition(" ")[2])

    def start(self) -> None:
        """Start it; returns at once."""
        assert self._process is None
        self._starts += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"operator-{self._starts:03}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program],
                env=self._environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def become_newer(self) -> None:
        """From the next start on be a release that builds other children, of images at ``NEWER_IMAGES`` (tag next)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        program = self._directory / "newer.py"
        program.write_text(NEWER)
        self.program = (str(program),)
        images = {f"INFLIGHT_{role.upper()}_IMAGE": f"{NEWER_IMAGES}/{role}:next" for role in names.ROLES}
        self._environment.update(images)

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as a kubelet would; its exit code."""
        return self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Keep it from running, without its knowledge."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def wait_ended(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Wait until it has ended of itself; its exit code."""
        process, self._process = self._process, None
        assert process is not None
        return process.wait(deadline_s)

    def metrics(self) -> dict[str, float]:
        """What it measures of itself, by name and labels as they are written."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for line in lines if line[0] != "#" for name, _, value in [line.rpartition(" ")]}

    def rss_mb(self) -> float:
        """Resident memory, in MB."""
        return float(psutil.Process(self.pid).memory_info().rss) / 1e6

    def wait_watching(self) -> None:
        """Wait until this life has seen the cluster and watches it."""
        before = self._starts
        file = self._directory / f"operator-{before:03}.log"
        eventually("the operator watches", lambda: "watching RLTrainingJob" in file.read_text(), 30)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_DEADLINE_S)
            raise


OPERATORS: set[str] = set()
"""Who the operators of this session were to the API server."""


@contextlib.contextmanager
def operator_for(
    cluster: Cluster,
    namespace: str,
    directory: Path,
    *,
    role: Path = CLUSTER_ROLE,
    server: str = "",
    account_namespace: str = "",
    **settings: str,
) -> Iterator[OperatorProcess]:
    """An operator, as a rule for one namespace only so that tests do not meet; not started yet, ended at the end.

    Args:
        cluster: the control plane.
        namespace: to look after; empty for all of them.
        directory: where its log goes.
        role: file with the ClusterRole that it is bound to.
        server: where it finds the API server, when that is not the usual address.
        account_namespace: where its service account is, when not in ``namespace``.
        settings: as environment variables without their prefix, in lower case.
    """
    environment = {f"INFLIGHT_{name.upper()}": value for name, value in {"namespace": namespace, **settings}.items()}
    home = account_namespace or namespace
    with cluster.service_account(role, home) as kubeconfig:
        user = f"system:serviceaccount:{home}:{kubeconfig.stem}"
        OPERATORS.add(user)
        if server:
            document = yaml.safe_load(kubeconfig.read_text())
            document["clusters"][0]["cluster"]["server"] = server
            kubeconfig.write_text(yaml.safe_dump(document, sort_keys=False))
        process = OperatorProcess(kubeconfig, directory, environment, user)
        try:
            yield process
        finally:
            process.kill()


class Coordinators:
    """Answers ``/v1/state`` in place of the jobs' coordinators, whose pods are fake: one server, a path for each job.

    Attributes:
        url: setting ``coordinator_url`` for an operator that should ask here.
        states: what to answer, by ``namespace/job``; jobs that are not in it get 503.
        asked: requests so far.
        tokens: bearer tokens that came with them.
    """

    def __init__(self) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                outer.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
                namespace, service = self.path.strip("/").split("/")[:2]
                state = outer.states.get(f"{namespace}/{service.removesuffix('-coordinator')}")
                body = json.dumps(state or {}).encode()
                self.send_response(200 if state is not None else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.states: dict[str, dict[str, Any]] = {}
        self.asked = 0
        self.tokens: set[str] = set()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{{namespace}}/{{service}}"

    def __enter__(self) -> Coordinators:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def state(step: int, steps: int = 260, reward: float = 0.5, outcome: str = "running") -> dict[str, Any]:
    """An answer of a coordinator."""
    return {
        "job": "j",
        "outcome": outcome,
        "reason": "",
        "epoch": 1,
        "step": step,
        "steps": steps,
        "policy_version": {"epoch": 1, "step": step},
        "groups": {"submitted": 10, "leased": 0, "completed": 0, "assigned": 0, "trained": 10, "dropped": 0},
        "metrics": {"reward_mean": reward},
        "checkpoint_step": step,
    }


def writes(events: list[AuditEvent], operator: OperatorProcess) -> list[AuditEvent]:
    """What an operator wrote, its Lease apart."""
    return [one for one in events if one.user == operator.user and one.is_write and one.resource != "leases"]
