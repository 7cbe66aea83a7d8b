"""Starts the reference server and runs it until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Final

import torch
from aiohttp import web
from pydantic import ValidationError
from transformers import AutoTokenizer

from inflight_runtime.config.roles import InferenceConfig
from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.inference.checkpoint_names import UnknownCheckpointError
from inflight_runtime.inference.reference.app import make_app
from inflight_runtime.inference.reference.core import ReferenceServer
from inflight_runtime.inference.reference.decoder import load_model
from inflight_runtime.inference.service import heartbeat
from inflight_runtime.weights.threads import in_thread

logger = logging.getLogger(__name__)

KEEPALIVE_S: Final = 300.0
"""Idle connections are kept this long: a busy client must not find its connection closed when it comes back."""
SHUTDOWN_S: Final = 2.0


async def serve(config: InferenceConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: the port is taken, or a file is missing.
        UnknownCheckpointError: see :class:`.core.ReferenceServer`.
        ValueError: transformers cannot load the model.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    torch.set_num_threads(1)
    token = config.token_file.read_text().strip()
    model = await in_thread(
        lambda: load_model(config.model.path, config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer, trust_remote_code=config.model.trust_remote_code)
    server = ReferenceServer(config, token, model, tokenizer)
    runner = web.AppRunner(
        make_app(server),
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        access_log=None,
    )
    await runner.setup()
    server.engine.start()
    client = CoordinatorClient(config.coordinator_url, token, timeout_s=5.0, retry_for_s=0.0)
    beats: asyncio.Task[None] | None = None
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        logger.info("%s serves %s at %s", config.server_id, config.served_name, config.advertise_url)
        beats = asyncio.create_task(heartbeat(client, server.service.beat, interval_s=config.heartbeat_s))
        await stop.wait()
    finally:
        if beats is not None:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
        server.engine.stop()
        await server.service.close()
        await runner.cleanup()
        await client.aclose()


def run_server(config: InferenceConfig) -> int:
    """Run :func:`serve`; the exit status: 0 after a signal, 2 when the server cannot be started."""
    try:
        asyncio.run(serve(config))
    except (OSError, UnknownCheckpointError, ValidationError, ValueError) as error:
        sys.stderr.write(f"inference server {config.server_id} not started: {error}\n")
        return 2
    return 0
