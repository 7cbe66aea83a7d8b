"""vLLM's half of the contract: pause, commit, label and resume by the engine client, the rest by RPC to the workers."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any, Final

from inflight_runtime.config.roles import InferenceConfig
from inflight_runtime.inference.checkpoint_names import ExpectedTensors
from inflight_runtime.inference.service import ContractError, Load
from inflight_runtime.protocol import InitGroupRequest, WeightUpdateRequest
from inflight_runtime.types import Version

logger = logging.getLogger(__name__)

POLL_S: Final = 0.002
RPC_TIMEOUT_S: Final = 60.0


class TransferFailedError(RuntimeError):
    """A worker could not join or receive; the message is its own."""


@dataclass(frozen=True, slots=True)
class StreamedUpdate:
    """An update that is received during the pause (NCCL)."""

    payload: str


class VllmWeightPort:
    """A :class:`inflight_runtime.inference.service.WeightPort` on vLLM's engine client."""

    def __init__(self, engine: Any, config: InferenceConfig, expected: ExpectedTensors) -> None:
        self._engine = engine
        self._config = config
        self._expected = expected
        self._backends: dict[str, str] = {}

    async def join(self, request: InitGroupRequest) -> None:
        """Join as ranks 1..tensor_parallel, in a thread of each worker."""
        if request.backend == "nccl" and self._config.device != "cuda":
            raise ContractError(400, "backend 'nccl' needs GPUs on both sides; this server runs on CPU, use 'gloo'")
        await self._in_background("inflight_join", request.model_dump_json())
        self._backends[request.tag] = request.backend

    async def leave(self, tag: str) -> None:
        """Leave the group; ends a receive over it."""
        self._backends.pop(tag, None)
        await self._rpc("inflight_leave", tag)

    async def check(self, request: WeightUpdateRequest) -> None:
        """Compare names and shapes with the model directory's."""
        if problem := self._expected.problem(request.tensors):
            raise ContractError(
                400, f"version {request.epoch}.{request.step} does not fit {self._config.model.path}: {problem}"
            )

    async def receive(self, request: WeightUpdateRequest) -> Any:
        """Receive and verify while generating; over NCCL leave it to the commit (paused-bucketed)."""
        payload = request.model_dump_json()
        if self._backends.get(request.tag) == "nccl":
            return StreamedUpdate(payload)
        await self._in_background("inflight_receive", payload)
        return None

    async def pause(self) -> None:
        """Freeze all requests between two steps; with ``recompute`` their KV cache is dropped and rebuilt."""
        recompute = self._config.kv_cache == "recompute"
        # The public pause_generation does the same and then sleeps 20 ms.
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute)

    async def commit(self, staged: Any) -> None:
        """Put the weights in place on every worker."""
        if isinstance(staged, StreamedUpdate):
            results = await self._rpc("inflight_commit_streaming", staged.payload, timeout_s=None)
        else:
            results = await self._rpc("inflight_commit", timeout_s=None)
        logger.debug("commit: %s", [json.loads(result) for result in results])

    async def set_version(self, version: Version) -> None:
        """Set the label that vLLM reports for every token."""
        await self._engine.update_weight_version(str(version))

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume_generation()

    async def abort_all(self, reason: str) -> None:
        """End every request with ``abort``."""
        requests = list(self._engine.output_processor.request_states)
        logger.error("aborting %d requests: %s", len(requests), reason)
        await self._engine.abort(requests, internal=True)

    def load(self) -> Load:
        """Sequences in the engine, counted where their results are awaited: no call to the engine."""
        total = len(self._engine.output_processor.request_states)
        running = min(total, self._config.max_concurrent)
        return Load(running=running, waiting=total - running)

    async def _in_background(self, method: str, payload: str) -> None:
        number = (await self._rpc(method, payload))[0]  # the same on every worker: all get the same calls
        while True:
            states = await self._rpc("inflight_poll", number)
            if all(state["done"] for state in states):
                break
            await asyncio.sleep(POLL_S)
        if errors := sorted({state["error"] for state in states if state["error"]}):
            raise TransferFailedError("; ".join(errors))

    async def _rpc(self, method: str, *args: str | int, timeout_s: float | None = RPC_TIMEOUT_S) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return list(await self._engine.collective_rpc(method, args=args))
