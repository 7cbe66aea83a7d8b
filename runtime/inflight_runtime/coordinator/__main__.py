"""``python -m inflight_runtime.coordinator --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

from aiohttp import web

from inflight_runtime import aio
from inflight_runtime.config.roles import CoordinatorConfig, load_role_config
from inflight_runtime.coordinator.app import build_app
from inflight_runtime.coordinator.database import LedgerDamagedError
from inflight_runtime.coordinator.ledger import Ledger
from inflight_runtime.coordinator.metrics import Metrics
from inflight_runtime.coordinator.payloads import PayloadError, SegmentStore
from inflight_runtime.coordinator.service import Coordinator
from inflight_runtime.garbage import spare_loaded_objects

BAD_INPUT: Final = 2
SHUTDOWN_S: Final = 3.0
"""How long requests under way may take to end after SIGTERM, in seconds."""

log = logging.getLogger("inflight.coordinator")


class StartError(Exception):
    """The coordinator cannot start; the message says why and what to do."""


def open_ledger(config: CoordinatorConfig) -> tuple[Ledger, SegmentStore]:
    """Open the run's ledger and payloads and check them against each other.

    Raises:
        StartError: they are damaged, another run's or in use.
    """
    try:
        config.data_dir.mkdir(parents=True, exist_ok=True)
        _lock(config.data_dir)
        payloads = SegmentStore(config.data_dir / "payloads")
        ledger = Ledger(config.data_dir / "ledger.sqlite", config, payloads)
        payloads.check(ledger.payload_ends())
    except (OSError, LedgerDamagedError, PayloadError) as error:
        raise StartError(str(error)) from error
    return ledger, payloads


async def serve(config: CoordinatorConfig, token: str) -> None:
    """Run the coordinator until SIGTERM or SIGINT.

    Raises:
        StartError: the data directory or the port cannot be used.
    """
    ledger, payloads = open_ledger(config)
    metrics = Metrics()
    coordinator = Coordinator(config, ledger, payloads, metrics.observe_commit)
    metrics.attach(coordinator)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(build_app(coordinator, metrics, token), access_log=None, shutdown_timeout=SHUTDOWN_S)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            raise StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
        spare_loaded_objects()
        log.info("coordinator of %s listens on %s:%d", config.job, config.host, config.port)
        await stop.wait()
        log.info("stopping")
    finally:
        await coordinator.close()
        await runner.cleanup()


def _lock(directory: Path) -> None:
    """Hold the data directory for this process's life.

    Raises:
        StartError: another coordinator holds it.
    """
    file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise StartError(f"another coordinator uses {directory}: stop it first") from None


def main() -> int:
    """Entry point; returns the exit code: 0 after a signal, 1 on a failure, 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m inflight_runtime.coordinator", description="The run's coordinator."
    )
    parser.add_argument("--config", type=Path, required=True, help="rendered CoordinatorConfig (JSON)")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    path: Path = parser.parse_args().config
    try:
        config = load_role_config(CoordinatorConfig, path)
        token = config.token_file.read_text().strip()
    except (OSError, ValueError) as error:
        log.error("cannot read the configuration %s: %s", path, error)
        return BAD_INPUT
    if not token:
        log.error("token file %s is empty: write the job's bearer token into it", config.token_file)
        return BAD_INPUT
    try:
        aio.run(serve(config, token))
    except StartError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
