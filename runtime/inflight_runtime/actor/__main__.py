"""``python -m inflight_runtime.actor --config FILE``: one actor process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from inflight_runtime import aio
from inflight_runtime.actor.loading import EnvironmentLoadError, load_environment
from inflight_runtime.actor.loop import FAILED, Actor
from inflight_runtime.actor.tokenizer import TokenizerError, load_tokenizer
from inflight_runtime.actor.watchdog import LoopWatchdog
from inflight_runtime.config.roles import ActorConfig, load_role_config
from inflight_runtime.coordinator.client import CoordinatorClient, CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.garbage import spare_loaded_objects
from inflight_runtime.protocol import FailRequest

log = logging.getLogger("inflight_runtime.actor")

BAD_INPUT = 2
TELL_DEADLINE_S = 10.0
SHORTEST_WATCH_S = 60.0


async def run(config: ActorConfig, token: str) -> int:
    """Run one actor until the run is over; returns the exit code."""
    async with CoordinatorClient(config.coordinator_url, token) as coordinator:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            environment = load_environment(config.environment)
            tokenizer = load_tokenizer(config.model)
        except (EnvironmentLoadError, TokenizerError) as error:
            log.error("%s", error)
            with contextlib.suppress(CoordinatorError, CoordinatorUnavailableError, TimeoutError):
                async with asyncio.timeout(TELL_DEADLINE_S):
                    await coordinator.fail(FailRequest(source=config.actor_id, reason=str(error)))
            return BAD_INPUT
        spare_loaded_objects()
        actor = Actor(config, environment, tokenizer, coordinator=coordinator, token=token, stop=stop)
        watchdog = LoopWatchdog(loop, max(config.environment.rollout_timeout_s, SHORTEST_WATCH_S))
        try:
            return await actor.run()
        finally:
            watchdog.close()
            environment.close()


def main() -> int:
    """Read the command line, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inflight_runtime.actor", description="One Inflight actor.")
    parser.add_argument("--config", type=Path, required=True, help="rendered ActorConfig, a JSON file")
    path = parser.parse_args().config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = load_role_config(ActorConfig, path)
        token = config.token_file.read_text().strip()
    except (OSError, ValueError) as error:
        log.error("--config %s: %s", path, error)
        return BAD_INPUT
    try:
        return aio.run(run(config, token))
    except OSError as error:
        log.error("%s", error)
        return FAILED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of an environment's libraries must not keep a process alive that has handed back its leases.
    os._exit(code)
