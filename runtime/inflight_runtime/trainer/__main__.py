"""``python -m inflight_runtime.trainer --config FILE``: one rank, plainly or started by :mod:`.launch`.

Exit codes: 0 all steps done; 1 the run cannot go on; 2 bad config, model or checkpoint directory; 3 another trainer has
taken over; 143 and 130 after SIGTERM and SIGINT, with a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from inflight_runtime.aio import BackgroundLoop
from inflight_runtime.config.roles import TrainerConfig, load_role_config
from inflight_runtime.coordinator.client import (
    CoordinatorClient,
    CoordinatorError,
    CoordinatorUnavailableError,
    FencedError,
)
from inflight_runtime.garbage import loading_modules
from inflight_runtime.trainer.engines import make_engine
from inflight_runtime.trainer.failure import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_SUPERSEDED, tell_launcher
from inflight_runtime.trainer.signals import StopRequest
from inflight_runtime.weights.errors import StaleEpochError

with loading_modules():  # torch
    from inflight_runtime.trainer.batching import BatchError
    from inflight_runtime.trainer.contract import EngineError, TrainerEngine
    from inflight_runtime.trainer.loop import ConfigMismatchError, NonFiniteError, Trainer
    from inflight_runtime.trainer.manifest import CheckpointError
    from inflight_runtime.trainer.ranks import RankError, Team, follow
    from inflight_runtime.trainer.remote import NoBatchError, Remote
    from inflight_runtime.weights.publisher import Publisher

logger = logging.getLogger("inflight_runtime.trainer")


def main() -> int:
    """Run one trainer rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inflight_runtime.trainer", description="Train one run.")
    parser.add_argument("--config", type=Path, required=True, help="rendered trainer config (JSON)")
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    who = f" rank {os.environ.get('RANK', '?')}" if world > 1 else ""
    log_format = f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=log_format, stream=sys.stderr)
    try:
        config = load_role_config(TrainerConfig, arguments.config)
        token = config.token_file.read_text().strip()
        engine = make_engine(config.engine)
        if config.engine == "single" and world != 1:
            raise EngineError(f"engine 'single' runs as one process and was started as {world}")
    except (OSError, ValueError, EngineError) as error:
        return _fail(f"cannot start: {error}", EXIT_BAD_INPUT)

    stop = StopRequest(config.checkpoint.stop_s)
    stop.install()
    try:
        team = Team.join(config.device, world)
        if team.rank:
            return follow(config, engine, team, stop)
    except EngineError as error:
        return _fail(f"cannot train: {error}", EXIT_BAD_INPUT)
    except RankError as error:
        return _fail(f"cannot train: {error}", EXIT_FAILED)
    except Exception as error:
        return _fail(f"this rank ends on an unexpected error: {error!r}", EXIT_FAILED, trace=True)
    code = _lead(config, engine, team, stop, token)
    team.end(code)
    return code


def _lead(config: TrainerConfig, engine: TrainerEngine, team: Team, stop: StopRequest, token: str) -> int:
    """Run rank 0; returns the exit code."""
    background = BackgroundLoop("trainer-network")
    client = CoordinatorClient(config.coordinator_url, token)
    trainer = Trainer(
        config,
        engine,
        Remote(background, client),
        lambda epoch, log: Publisher(client, epoch=epoch, token=token, config=config.weight_sync, log=log),
        stop,
        team=team,
    )
    try:
        trainer.run()
    except (FencedError, StaleEpochError) as error:
        return _fail(f"another trainer has taken over this run, so this one ends: {error}", EXIT_SUPERSEDED)
    except (EngineError, ConfigMismatchError) as error:
        return _fail(f"cannot train: {error}", EXIT_BAD_INPUT)
    except CheckpointError as error:
        return _fail(str(error), EXIT_FAILED if trainer.step else EXIT_BAD_INPUT)
    except (BatchError, NoBatchError, NonFiniteError, CoordinatorError, CoordinatorUnavailableError, OSError) as error:
        return _fail(f"training ends: {error}", EXIT_FAILED)
    except Exception as error:
        return _fail(f"training ends on an unexpected error: {error!r}", EXIT_FAILED, trace=True)
    finally:
        background.close()
    return stop.exit_code if stop.requested and trainer.step < config.steps else 0


def _fail(reason: str, code: int, *, trace: bool = False) -> int:
    logger.error("%s", reason, exc_info=trace)
    tell_launcher(reason)
    return code


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of transports must not hold up, or crash, a process that has done its work.
    os._exit(code)
