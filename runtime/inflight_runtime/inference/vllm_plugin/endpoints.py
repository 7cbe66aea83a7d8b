"""The plugin that vLLM's API server loads: the contract's routes, the heartbeat, an orderly end.

vLLM only logs a plugin that fails to load and starts without it, so readiness is asked of our own routes, never of
/health: ``/readyz`` and ``/healthz`` tell whether, and need no token; ``/runtime/v1/status`` tells all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from inflight_runtime.config.roles import InferenceConfig, load_role_config
from inflight_runtime.coordinator.client import CoordinatorClient
from inflight_runtime.garbage import spare_loaded_objects
from inflight_runtime.inference.checkpoint_names import read_expected_tensors
from inflight_runtime.inference.service import ContractError, UpdateService, heartbeat
from inflight_runtime.inference.vllm_launch import CONFIG_ENV, PLUGIN_NAME
from inflight_runtime.inference.vllm_plugin.generate import encode_reply, sampling_arguments
from inflight_runtime.inference.vllm_plugin.guard import Guard, error_response
from inflight_runtime.inference.vllm_plugin.logs import adopt_vllm_logging
from inflight_runtime.inference.vllm_plugin.port import VllmWeightPort
from inflight_runtime.inference.vllm_plugin.salts import salt_prompts
from inflight_runtime.protocol import (
    DestroyGroupRequest,
    GenerateRequest,
    InitGroupRequest,
    MemberBeat,
    WeightUpdateRequest,
)
from inflight_runtime.refusals import problems

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)

JSON: Final = "application/json"
STARTED_POLL_S: Final = 0.02
TERM_GRACE_S: Final = 6.0
"""After SIGTERM vLLM normally ends in 2 s, and now and then not at all."""


class InflightEndpoints:
    """vLLM endpoint plugin (entry point group ``vllm.endpoint_plugins``); see ``vllm.plugins.endpoint_plugins``."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Read the role config that the launcher named in the environment.

        Raises:
            KeyError: the server was not started by ``python -m inflight_runtime.inference``.
        """
        adopt_vllm_logging()
        self._config = load_role_config(InferenceConfig, Path(os.environ[CONFIG_ENV]))
        self._token = self._config.token_file.read_text().strip()
        self._engine: Any = None
        self._service: UpdateService | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._requests = 0

    # --- wiring -------------------------------------------------------------------------------------------------------

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; plain Starlette ones, since they parse and encode their bodies themselves."""
        for path, method, handler in (
            ("/init_process_group", "POST", self._init_group),
            ("/destroy_process_group", "POST", self._destroy_group),
            ("/request_weight_update", "POST", self._update),
            ("/healthz", "GET", self._healthz),
            ("/readyz", "GET", self._readyz),
            ("/runtime/v1/status", "GET", self._status),
            ("/runtime/v1/generate", "POST", self._generate),
        ):
            app.add_route(path, _answer_errors(handler), methods=[method])
        app.add_middleware(Guard, token=self._token)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take hold of the engine; from here on the routes work."""
        del args
        self._engine = engine_client
        port = VllmWeightPort(engine_client, self._config, read_expected_tensors(Path(self._config.model.path)))
        self._service = UpdateService(self._config, port, engine="vllm", load=port.load)
        salt_prompts(engine_client, self._service)
        self._tasks.append(asyncio.create_task(self._run(state, self._service)))

    @property
    def service(self) -> UpdateService:
        """The contract's state.

        Raises:
            ContractError: 503 while the engine is being started.
        """
        if self._service is None:
            raise ContractError(503, "the engine is not up yet")
        if getattr(self._engine, "errored", False):
            self._service.mark_broken("the engine has died; see the server's log")
        return self._service

    async def _run(self, state: Any, service: UpdateService) -> None:
        """Announce the server from the moment it can be reached, and leave when it is told to end."""
        while not getattr(getattr(state, "server", None), "started", False):  # noqa: ASYNC110  uvicorn has no event
            await asyncio.sleep(STARTED_POLL_S)
        spare_loaded_objects()
        stop = asyncio.Event()
        # vLLM listens for SIGINT as well: that handler is left in place and used to go on with its own shutdown.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        client = CoordinatorClient(self._config.coordinator_url, self._token, timeout_s=5.0, retry_for_s=0.0)
        async with client:
            beats = asyncio.create_task(heartbeat(client, self._beat, interval_s=self._config.heartbeat_s))
            try:
                await stop.wait()
            finally:
                threading.Thread(target=_end_at_the_latest, args=(TERM_GRACE_S,), daemon=True).start()
                beats.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beats
                await service.close()
        os.kill(os.getpid(), signal.SIGINT)

    def _beat(self) -> MemberBeat:
        return self.service.beat()

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _init_group(self, request: Request) -> Response:
        return _json(await self.service.init_group(await _body(request, InitGroupRequest)))

    async def _destroy_group(self, request: Request) -> Response:
        await self.service.destroy_group(await _body(request, DestroyGroupRequest))
        return Response(status_code=204)

    async def _update(self, request: Request) -> Response:
        return _json(await self.service.update(await _body(request, WeightUpdateRequest)))

    async def _healthz(self, request: Request) -> Response:
        del request
        return _probe(self.service.broken)

    async def _readyz(self, request: Request) -> Response:
        del request
        return _probe(self.service.why_not_ready())

    async def _status(self, request: Request) -> Response:
        del request
        return _json(self.service.status())

    async def _generate(self, request: Request) -> Response:
        ask = await _body(request, GenerateRequest)
        service = self.service
        service.admit()
        work = asyncio.create_task(self._outputs(ask))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ContractError(499, "the client went away")
            outputs = work.result()
        finally:
            # Cancelling the generation makes vLLM drop its sequences.
            work.cancel()
            gone.cancel()
        return Response(encode_reply(self._config.server_id, service.boot_id, outputs), media_type=JSON)

    async def _outputs(self, ask: GenerateRequest) -> list[Any]:
        self._requests += 1
        prompt = tokens_input(ask.prompt_ids)
        arguments = sampling_arguments(ask, self._config.model.max_length)
        # There is one result, when every answer has ended.
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        results = [result async for result in self._engine.generate(prompt, params, f"inflight-{self._requests}")]
        if not results:
            raise ContractError(503, "the engine gave no answer; retry")
        return list(results[-1].outputs)


def _answer_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turn errors into the contract's error bodies."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ContractError as error:
            return error_response(error)
        except ValidationError as error:
            return error_response(ContractError(400, f"{request.url.path}: {problems(error)[0]}"))
        except VLLMClientError as error:
            return error_response(ContractError(400, str(error)))
        except GracefulHTTPError as error:
            return error_response(ContractError(int(error.http_status), error.message))
        except Exception as error:
            logger.exception("%s", request.url.path)
            return error_response(ContractError(500, f"{request.url.path}: {type(error).__name__}: {error}"))

    return answer


async def _body(request: Request, model: type[ModelT]) -> ModelT:
    return model.model_validate_json(await request.body())


def _json(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type=JSON)


def _probe(why_not: str) -> Response:
    return Response(f"{why_not or 'ok'}\n", status_code=503 if why_not else 200, media_type="text/plain")


async def _disconnected(request: Request) -> None:
    """Return when the client has gone (the body has been read, so nothing else arrives)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _end_at_the_latest(grace_s: float) -> None:
    """End this process and what it started when an orderly shutdown hangs."""
    threading.Event().wait(grace_s)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(0)
