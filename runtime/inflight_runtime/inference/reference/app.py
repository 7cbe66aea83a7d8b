"""The reference server's routes on aiohttp: the inference contract, and OpenAI's format for people and evaluation."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from inflight_runtime.inference.reference import openai_format as openai
from inflight_runtime.inference.reference.core import ReferenceServer, completion
from inflight_runtime.inference.reference.engine import Answer, EngineError
from inflight_runtime.inference.reference.faults import die
from inflight_runtime.inference.reference.stops import TextStream
from inflight_runtime.inference.service import ContractError, check_token
from inflight_runtime.protocol import (
    DestroyGroupRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    InitGroupRequest,
    WeightUpdateRequest,
)
from inflight_runtime.refusals import problems

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS: Final = frozenset({"/health", "/healthz", "/readyz"})
"""Probes carry no token."""
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""A manifest of a large model has thousands of tensors."""


def make_app(server: ReferenceServer) -> web.Application:
    """All routes of the inference contract; every one but the probes' asks for the token."""
    routes = _Routes(server)
    app = web.Application(middlewares=[_errors, _authorize(server.token)], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/healthz", routes.health),
            web.get("/readyz", routes.ready),
            web.get("/runtime/v1/status", routes.status),
            web.post("/runtime/v1/generate", routes.generate),
            web.post("/init_process_group", routes.init_group),
            web.post("/destroy_process_group", routes.destroy_group),
            web.post("/request_weight_update", routes.update),
            web.get("/v1/models", routes.models),
            web.post("/v1/completions", routes.completions),
            web.post("/v1/chat/completions", routes.chat),
            web.post("/v1/chat/completion", routes.chat),
        ]
    )
    return app


class _Routes:
    def __init__(self, server: ReferenceServer) -> None:
        self._server = server
        self._requests = 0

    async def health(self, _: web.Request) -> web.StreamResponse:
        broken = self._server.service.broken
        return _error(503, broken) if broken else web.json_response({})

    async def ready(self, _: web.Request) -> web.StreamResponse:
        why_not = self._server.service.why_not_ready()
        return _error(503, why_not) if why_not else web.json_response({})

    async def status(self, _: web.Request) -> web.StreamResponse:
        return _reply(self._server.service.status())

    async def init_group(self, request: web.Request) -> web.StreamResponse:
        return _reply(await self._server.service.init_group(await _body(request, InitGroupRequest)))

    async def destroy_group(self, request: web.Request) -> web.StreamResponse:
        await self._server.service.destroy_group(await _body(request, DestroyGroupRequest))
        return web.Response(status=204)

    async def update(self, request: web.Request) -> web.StreamResponse:
        return _reply(await self._server.service.update(await _body(request, WeightUpdateRequest)))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request, GenerateRequest)
        await self._inject_fault(request)
        self._server.service.admit()
        answers = await self._server.generate(
            asked.prompt_ids,
            n=asked.n,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            seeds=asked.seeds,
            ignore_eos=asked.ignore_eos,
        )
        return _reply(
            GenerateReply(
                server_id=self._server.config.server_id,
                boot_id=self._server.service.boot_id,
                completions=[completion(answer) for answer in answers],
            )
        )

    async def models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(openai.models(self._server.config.served_name, self._server.config.model.max_length))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request, openai.CompletionRequest)
        prompt = asked.prompt
        ids = self._server.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return await self._openai(request, asked, list(ids), openai.TEXT)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request, openai.ChatRequest)
        try:
            ids = self._server.tokenizer.apply_chat_template(
                [message.model_dump(exclude_none=True) for message in asked.messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:
            raise ContractError(400, f"the model's chat template refuses these messages: {error}") from error
        return await self._openai(request, asked, list(ids), openai.CHAT)

    async def _openai(
        self, request: web.Request, asked: openai.OpenAIRequest, ids: list[int], style: openai.Style
    ) -> web.StreamResponse:
        server = self._server
        if asked.model not in (None, server.config.served_name):
            raise ContractError(404, f"model {asked.model!r} is not served here, {server.config.served_name!r} is")
        if server.service.broken:
            raise ContractError(503, server.service.broken)
        reply = openai.Reply(style, server.config.served_name, server.tokenizer, len(ids), int(time.time()))
        seeds = None if asked.seed is None else [asked.seed + index for index in range(asked.n)]
        tokens: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(index: int, token: int) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, (index, token))

        generation = server.generate(
            ids,
            n=asked.n,
            max_tokens=asked.limit(style),
            temperature=asked.temperature,
            stop=asked.stop_texts(),
            seeds=seeds,
            listener=listen if asked.stream else None,
        )
        if not asked.stream:
            answers = await generation
            return web.json_response(reply.whole(answers, asked.stop_texts(), with_logprobs=asked.wants_logprobs()))
        return await self._stream(request, asked, reply, tokens, asyncio.create_task(generation))

    async def _stream(
        self,
        request: web.Request,
        asked: openai.OpenAIRequest,
        reply: openai.Reply,
        tokens: asyncio.Queue[tuple[int, int]],
        generation: asyncio.Task[list[Answer]],
    ) -> web.StreamResponse:
        """Server-sent events: a piece of text each, then the reasons, then ``[DONE]``."""
        texts = [TextStream(self._server.tokenizer, asked.stop_texts()) for _ in range(asked.n)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            first = asyncio.create_task(tokens.get())
            await asyncio.wait([first, generation], return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                first.cancel()
                await generation  # refused before the first token: an ordinary error answer
            await response.prepare(request)
            entry: tuple[int, int] | None = await first
            while entry is not None:
                if piece := texts[entry[0]].push(entry[1]):
                    await _event(response, reply.piece(entry[0], piece))
                entry = await _next(tokens, generation)
            for index, answer in enumerate(await generation):
                await _event(response, reply.piece(index, texts[index].finish(), answer.finish))
            await response.write(b"data: [DONE]\n\n")
        finally:
            generation.cancel()
        return response

    async def _inject_fault(self, request: web.Request) -> None:
        faults = self._server.faults
        self._requests += 1
        if faults.die_after_requests and self._requests >= faults.die_after_requests:
            die()
        if faults.drop_generate_every and self._requests % faults.drop_generate_every == 0:
            if request.transport is not None:
                request.transport.abort()
            raise ContractError(503, "fault switch: the connection is dropped")
        if faults.hang_generate_every and self._requests % faults.hang_generate_every == 0:
            await asyncio.Event().wait()


async def _next(
    tokens: asyncio.Queue[tuple[int, int]], generation: asyncio.Task[list[Answer]]
) -> tuple[int, int] | None:
    """The next token, or ``None`` when the generation has ended and all of its tokens are taken."""
    getter = asyncio.create_task(tokens.get())
    await asyncio.wait([getter, generation], return_when=asyncio.FIRST_COMPLETED)
    if not getter.done():
        # The generation is over. Its tokens were put before its result, so one turn of the loop brings the rest.
        await asyncio.sleep(0)
        if not getter.done():
            getter.cancel()
            return None
    return getter.result()


def _authorize(token: str) -> Any:
    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            check_token(request.headers, token)
        return await handler(request)

    return authorize


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ContractError as error:
        return _error(error.status, error.message)
    except EngineError as error:
        return _error(503, str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        logger.exception("%s %s", request.method, request.path)
        return _error(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


async def _body(request: web.Request, model: type[ModelT]) -> ModelT:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        raise ContractError(400, f"{request.method} {request.path}: {'; '.join(problems(error))}") from error


async def _event(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(body)}\n\n".encode())


def _reply(message: BaseModel) -> web.Response:
    return web.json_response(text=message.model_dump_json())


def _error(status: int, message: str) -> web.Response:
    return web.json_response(text=ErrorReply(error=message).model_dump_json(exclude_none=True), status=status)
