"""The coordinator's HTTP face: routes, token, errors, metrics. What the routes mean stands in ``protocol``."""

from __future__ import annotations

import hmac
import json
import logging
import math
import sqlite3
import time
from typing import Final, TypeVar

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ValidationError

from inflight_runtime.coordinator.membership import MemberStateError, StaleMemberError
from inflight_runtime.coordinator.metrics import Metrics
from inflight_runtime.coordinator.run import RefusedError
from inflight_runtime.coordinator.service import Coordinator
from inflight_runtime.coordinator.writer import WriterBusyError, WriterClosedError
from inflight_runtime.protocol import (
    CheckpointDurable,
    DatasetInfo,
    DropRequest,
    ErrorReply,
    FailRequest,
    LeaseRequest,
    MemberBeat,
    MemberState,
    RenewRequest,
    StepCommit,
    TrainerStart,
)
from inflight_runtime.refusals import problems
from inflight_runtime.types import InvalidSampleError

MessageT = TypeVar("MessageT", bound=BaseModel)

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})
LARGEST_GROUP_BYTES: Final = 64 * 1024 * 1024
LARGEST_JSON_BYTES: Final = 1024 * 1024
LONGEST_WAIT_S: Final = 30.0
MOST_SAMPLES: Final = 1000
JSON_HEADERS: Final = {hdrs.CONTENT_TYPE: "application/json"}

log = logging.getLogger(__name__)


def build_app(coordinator: Coordinator, metrics: Metrics, token: str) -> web.Application:
    """Make the application around a running coordinator.

    Args:
        coordinator: answers the requests.
        metrics: shown under ``/metrics``; every request is noted in it.
        token: the job's bearer token.
    """
    routes = _Routes(coordinator, metrics)
    app = web.Application(client_max_size=LARGEST_GROUP_BYTES, middlewares=[_guard(token, metrics)])
    app.add_routes(
        [
            web.get("/healthz", routes.healthz),
            web.get("/readyz", routes.readyz),
            web.get("/metrics", routes.metrics),
            web.post("/v1/dataset", routes.dataset),
            web.post("/v1/leases", routes.lease),
            web.post("/v1/leases/renew", routes.renew),
            web.post("/v1/leases/release", routes.release),
            web.post("/v1/groups", routes.submit),
            web.post(r"/v1/groups/{group_id:\d+}/drop", routes.drop),
            web.post("/v1/trainer/start", routes.start_trainer),
            web.get(r"/v1/steps/{step:\d+}/batch", routes.batch),
            web.post(r"/v1/steps/{step:\d+}/commit", routes.commit),
            web.post("/v1/checkpoints", routes.checkpoint),
            web.post("/v1/members", routes.beat),
            web.get("/v1/members", routes.members),
            web.post("/v1/members/{server_id}/leave", routes.leave),
            web.post("/v1/members/{server_id}/state", routes.member_state),
            web.get("/v1/samples", routes.samples),
            web.post("/v1/fail", routes.fail),
            web.get("/v1/state", routes.state),
        ]
    )
    return app


class _Routes:
    """One method per route."""

    def __init__(self, coordinator: Coordinator, metrics: Metrics) -> None:
        self._coordinator = coordinator
        self._metrics = metrics

    async def healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def readyz(self, _: web.Request) -> web.Response:
        ready = self._coordinator.ready
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4"})

    async def dataset(self, request: web.Request) -> web.Response:
        await self._coordinator.announce(await _body(request, DatasetInfo))
        return web.Response(status=204)

    async def lease(self, request: web.Request) -> web.Response:
        return _reply(await self._coordinator.lease(await _body(request, LeaseRequest)))

    async def renew(self, request: web.Request) -> web.Response:
        return _reply(self._coordinator.renew(await _body(request, RenewRequest)))

    async def release(self, request: web.Request) -> web.Response:
        await self._coordinator.release(await _body(request, RenewRequest))
        return web.Response(status=204)

    async def submit(self, request: web.Request) -> web.Response:
        status, reply = await self._coordinator.submit(await request.read())
        return _reply(reply, status)

    async def drop(self, request: web.Request) -> web.Response:
        await self._coordinator.drop(int(request.match_info["group_id"]), await _body(request, DropRequest))
        return web.Response(status=204)

    async def start_trainer(self, request: web.Request) -> web.Response:
        return _reply(await self._coordinator.start_trainer(await _body(request, TrainerStart)))

    async def batch(self, request: web.Request) -> web.Response:
        step, epoch = int(request.match_info["step"]), int(_number(request, "epoch", -1))
        data = await self._coordinator.batch(step, epoch, _wait(request))
        if data is None:
            return web.Response(status=204)
        return web.Response(body=data, headers={hdrs.CONTENT_TYPE: "application/msgpack"})

    async def commit(self, request: web.Request) -> web.Response:
        await self._coordinator.commit(int(request.match_info["step"]), await _body(request, StepCommit))
        return web.Response(status=204)

    async def checkpoint(self, request: web.Request) -> web.Response:
        await self._coordinator.checkpoint(await _body(request, CheckpointDurable))
        return web.Response(status=204)

    async def beat(self, request: web.Request) -> web.Response:
        return _reply(self._coordinator.beat(await _body(request, MemberBeat)))

    async def leave(self, request: web.Request) -> web.Response:
        self._coordinator.leave(request.match_info["server_id"], request.query.get("boot_id", ""))
        return web.Response(status=204)

    async def member_state(self, request: web.Request) -> web.Response:
        self._coordinator.set_member_state(request.match_info["server_id"], await _body(request, MemberState))
        return web.Response(status=204)

    async def members(self, request: web.Request) -> web.Response:
        return _reply(await self._coordinator.members(int(_number(request, "revision", -1)), _wait(request)))

    async def samples(self, request: web.Request) -> web.Response:
        step = int(_number(request, "step", -1)) if "step" in request.query else None
        limit = min(MOST_SAMPLES, max(1, int(_number(request, "limit", 32))))
        found = await self._coordinator.samples(step, limit)
        return web.Response(body=json.dumps(found).encode(), headers=JSON_HEADERS)

    async def fail(self, request: web.Request) -> web.Response:
        await self._coordinator.fail(await _body(request, FailRequest))
        return web.Response(status=204)

    async def state(self, _: web.Request) -> web.Response:
        return _reply(self._coordinator.state())


def _guard(token: str, metrics: Metrics) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun = time.perf_counter()
        if request.path not in OPEN_PATHS and not hmac.compare_digest(
            request.headers.get(hdrs.AUTHORIZATION, "").encode(), expected
        ):
            return _error(401, "the bearer token is missing or wrong: send the token of this job's token file")
        response = await _answer(request, handler)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        metrics.observe_request(request.method, route, response.status, time.perf_counter() - begun)
        return response

    return guard


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as error:
        return _error(error.status, str(error))
    except StaleMemberError as error:
        return _error(409, str(error))
    except ValidationError as error:
        return _error(422, f"{request.method} {request.path}: {'; '.join(problems(error))}")
    except (InvalidSampleError, MemberStateError) as error:
        return _error(422, f"{request.method} {request.path}: {error}")
    except (WriterBusyError, WriterClosedError) as error:
        return _error(503, str(error))
    except (sqlite3.Error, OSError) as error:
        return _error(503, f"the ledger cannot be written: {error}; is the disk full?")
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


async def _body(request: web.Request, model: type[MessageT]) -> MessageT:
    if request.content_length is None or request.content_length > LARGEST_JSON_BYTES:
        raise RefusedError(413, f"a JSON body of a stated length of at most {LARGEST_JSON_BYTES} bytes is expected")
    return model.model_validate_json(await request.read())


def _reply(message: BaseModel, status: int = 200) -> web.Response:
    return web.Response(body=message.model_dump_json().encode(), status=status, headers=JSON_HEADERS)


def _error(status: int, message: str) -> web.Response:
    return _reply(ErrorReply(error=message), status)


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RefusedError(422, f"query parameter {name}={text!r} is not a number")
    return value


def _wait(request: web.Request) -> float:
    return min(LONGEST_WAIT_S, max(0.0, _number(request, "wait_seconds", 0.0)))
