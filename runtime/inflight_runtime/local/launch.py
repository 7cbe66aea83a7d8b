"""How each role of a local run is started: command, environment, readiness, bounds."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp

from inflight_runtime.api import RLTrainingJob
from inflight_runtime.config.roles import ActorConfig, InferenceConfig
from inflight_runtime.local.machine import LOOPBACK, Prepared
from inflight_runtime.local.supervisor import RoleSpec

RESTARTS: Final = 5
PROBE_TIMEOUT_S: Final = 2.0
COORDINATOR_READY_S: Final = 60.0
ACTOR_READY_S: Final = 120.0
FAREWELL_S: Final = 60.0
"""What a trainer may take beyond ``stopSeconds``, its ranks' end and its farewell to the coordinator included."""
LAUNCHER_S: Final = 10.0
"""What the ranks' launcher needs of that for itself."""
GRACE_S: Final = 10.0


def trainer_grace_s(job: RLTrainingJob) -> float:
    """Seconds between SIGTERM and SIGKILL for a trainer."""
    return job.spec.checkpoint.stop_seconds + FAREWELL_S


def role_environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a role: the user's own, and what keeps processes on few cores from fighting."""
    environment = dict(base)
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # Models of a local run are directories: a look at the hub would only cost time, or the run where there is no net.
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # Roles get a temporary directory that ends with the run; what torch has compiled is worth keeping.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    return environment


class Launcher:
    """Makes the specs of all roles of one run.

    Args:
        prepared: the run.
        session: for probes.
        ready_within_s: deadline of an inference server's readiness.
    """

    def __init__(self, prepared: Prepared, session: aiohttp.ClientSession, ready_within_s: float) -> None:
        self._job = prepared.job
        self._rendered = prepared.rendered
        self._directory = prepared.directory
        self._machine = prepared.machine
        self._ports = prepared.ports
        self._session = session
        self._ready_within_s = ready_within_s
        self._token = prepared.directory.token()

    def coordinator(self) -> RoleSpec:
        """The coordinator; always at the same port, which the others know."""
        url = f"http://{LOOPBACK}:{self._rendered.coordinator.port}/readyz"
        return RoleSpec(
            name="coordinator",
            kind="coordinator",
            command=lambda: self._command("coordinator", "coordinator"),
            log=self._directory.log("coordinator"),
            environment=role_environment(os.environ, 1),
            ready=lambda: self._answers(url),
            ready_within_s=COORDINATOR_READY_S,
            restarts=RESTARTS,
            grace_s=GRACE_S,
        )

    def inference(self) -> list[RoleSpec]:
        """The inference servers."""
        return [self._server(config) for config in self._rendered.inference]

    def actors(self) -> list[RoleSpec]:
        """The actors."""
        return [self._actor(config) for config in self._rendered.actors]

    def trainer(self) -> RoleSpec:
        """The trainer: its ranks' launcher, or for one rank plain Python with the environment that it would give it.

        The launcher would import torch a second time, which costs seconds and 0.3 GB for a single rank.
        """
        ranks = self._job.spec.trainer.processes_per_node
        grace_s = trainer_grace_s(self._job)
        environment = role_environment(os.environ, self._machine.threads)
        if ranks == 1:
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self._ports.take())}
        else:
            environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{grace_s - LAUNCHER_S:.0f}"

        def command() -> list[str]:
            if ranks == 1:
                return self._command("trainer", "trainer")
            meeting = ["--master-addr", LOOPBACK, "--master-port", str(self._ports.take())]
            return [*self._command("trainer.launch", "trainer"), "--nproc-per-node", str(ranks), *meeting]

        return RoleSpec(
            name="trainer",
            kind="trainer",
            command=command,
            log=self._directory.log("trainer"),
            environment=environment,
            restarts=self._job.spec.trainer.max_restarts,
            startup_restarts=self._job.spec.trainer.max_restarts,
            grace_s=grace_s,
            completes=True,
            forgiven_after_s=float("inf"),
        )

    def _server(self, config: InferenceConfig) -> RoleSpec:
        name = config.server_id
        path = self._directory.config / f"{name}.json"
        started = False
        current = config

        def command() -> list[str]:
            nonlocal started, current
            if started:
                # A server that is ending may hold its port for a while, and even answer on it.
                port = self._ports.take()
                current = current.model_copy(update={"port": port, "advertise_url": f"http://{current.host}:{port}"})
                path.write_text(current.model_dump_json(indent=2) + "\n")
            started = True
            return self._command("inference", name)

        return RoleSpec(
            name=name,
            kind="inference",
            command=command,
            log=self._directory.log(name),
            environment=role_environment(os.environ, config.threads),
            ready=lambda: self._answers(f"{current.advertise_url}/runtime/v1/status"),
            ready_within_s=self._ready_within_s,
            restarts=RESTARTS,
            grace_s=GRACE_S,
        )

    def _actor(self, config: ActorConfig) -> RoleSpec:
        url = f"http://{config.host}:{config.health_port}/readyz"
        return RoleSpec(
            name=config.actor_id,
            kind="actor",
            command=lambda: self._command("actor", config.actor_id),
            log=self._directory.log(config.actor_id),
            environment=role_environment(os.environ, 1),
            ready=lambda: self._answers(url),
            # An actor may wait for the servers before it says that it is ready.
            ready_within_s=ACTOR_READY_S + self._ready_within_s,
            restarts=RESTARTS,
            grace_s=GRACE_S,
            completes=True,
        )

    def _command(self, module: str, name: str) -> list[str]:
        config = self._directory.config / f"{name}.json"
        return [sys.executable, "-m", f"inflight_runtime.{module}", "--config", str(config)]

    async def _answers(self, url: str) -> bool:
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._session.get(url, headers=headers, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
