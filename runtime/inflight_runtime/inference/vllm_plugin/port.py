"""vLLM's half of the contract: pause, commit, label and resume by the engine client, the rest by RPC to the workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Final

from inflight_runtime.aio import forget
from inflight_runtime.config.roles import InferenceConfig
from inflight_runtime.inference.checkpoint_names import ExpectedTensors
from inflight_runtime.inference.service import ContractError, Load
from inflight_runtime.inference.vllm_plugin.control import ControlClient, ControlError, commit_report
from inflight_runtime.protocol import InitGroupRequest, WeightUpdateRequest
from inflight_runtime.types import Version

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S: Final = 60.0


class TransferFailedError(RuntimeError):
    """A worker could not join or receive; the message is its own."""


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """An update that lies verified in every worker; ``swap``: its commit takes no time and cannot fail half-way."""

    number: int
    swap: bool


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
        self._workers: list[ControlClient] = []
        self._numbers = itertools.count(1)
        self._late: asyncio.Future[Any] | None = None

    async def join(self, request: InitGroupRequest) -> None:
        """Join as ranks 1..tensor_parallel, in a thread of each worker."""
        if request.backend == "nccl" and self._config.device != "cuda":
            raise ContractError(400, "backend 'nccl' needs GPUs on both sides; this server runs on CPU, use 'gloo'")
        if not self._workers:
            self._workers = [await ControlClient.connect(path) for path in await self._rpc("inflight_listen")]
        await self._ask_workers("join", payload=request.model_dump_json())
        self._backends[request.tag] = request.backend

    async def leave(self, tag: str) -> None:
        """Leave the group; ends a receive over it."""
        self._backends.pop(tag, None)
        await self._ask_workers("leave", tag=tag)

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
        number = next(self._numbers)
        swaps = await self._ask_workers("receive", payload=payload, number=number)
        return StagedUpdate(number, all(swaps))

    async def pause(self) -> None:
        """Freeze all requests between two steps; with ``recompute`` their KV cache is dropped and rebuilt."""
        recompute = self._config.kv_cache == "recompute"
        # The public pause_generation does the same and then sleeps 20 ms.
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute)

    async def commit(self, staged: Any) -> None:
        """Put the weights in place on every worker."""
        if isinstance(staged, StreamedUpdate):
            await self._rpc("inflight_commit_streaming", staged.payload, timeout_s=None)
        else:
            await self._rpc("inflight_commit", staged.number, timeout_s=None)

    def atomic(self, staged: Any) -> bool:
        """Whether the whole commit may be sent to the engine as one train of messages.

        Not where the pause has to wait for a step that runs ahead (GPU), or for a cache to be dropped.
        """
        swap = isinstance(staged, StagedUpdate) and staged.swap
        return swap and self._config.device == "cpu" and self._config.kv_cache == "keep"

    async def install(self, staged: Any, version: Version) -> float:
        """Pause, commit, label and resume without a word in between: the engine stands still for a millisecond.

        The engine takes messages in the order in which they were sent, and none of its steps samples between the first
        and the last. Should the commit fail, the worker refuses every further step.
        """
        if self._late is not None:
            await self._late  # raises what went wrong with the label of the version before
        (worker,) = self._workers
        with worker.promise(commit_report(staged.number)) as committed:
            # Pausing is answered only when the engine is idle, if a request has just ended: nothing depends on it.
            pause = asyncio.ensure_future(self.pause())
            pause.add_done_callback(forget)
            commit = asyncio.ensure_future(self._rpc("inflight_commit_or_die", staged.number))
            commit.add_done_callback(forget)
            # Sent is as good as done: the engine labels before it goes on, and can fail to only by dying.
            self._late = asyncio.gather(self.set_version(version), self.resume())
            self._late.add_done_callback(forget)
            await asyncio.wait((committed, commit), return_when=asyncio.FIRST_COMPLETED)
            return float(committed.result() if committed.done() else max(commit.result()))

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
        """Sequences that have a token, and that have none yet; counted where results arrive, without the engine."""
        states = self._engine.output_processor.request_states.values()
        waiting = sum(state.is_prefilling for state in states)
        return Load(running=len(states) - waiting, waiting=waiting)

    async def _ask_workers(self, call: str, **arguments: Any) -> list[Any]:
        """Ask every worker over its control socket; their results.

        Raises:
            TransferFailedError: with the words of those that failed.
        """
        asked = [worker.call(call, **arguments) for worker in self._workers]
        results = await asyncio.gather(*asked, return_exceptions=True)
        if errors := sorted({str(result) for result in results if isinstance(result, ControlError)}):
            raise TransferFailedError("; ".join(errors))
        if others := [result for result in results if isinstance(result, BaseException)]:
            raise others[0]
        return results

    async def _rpc(self, method: str, *args: str | int, timeout_s: float | None = RPC_TIMEOUT_S) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return list(await self._engine.collective_rpc(method, args=args))
