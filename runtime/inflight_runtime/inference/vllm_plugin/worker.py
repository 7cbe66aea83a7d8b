"""What runs inside vLLM's workers: receive in a thread while the engine generates, put in place by one call.

Loading goes through vLLM's layerwise reload: plain ``load_weights`` corrupts the model on CPU, where linear weights are
repacked after loading. On CPU later updates are prepared in the thread and swapped in (:mod:`.swap`). Nothing here may
block an RPC for long: while a call runs, the engine does not generate.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from inflight_runtime.inference.vllm_plugin.logs import adopt_vllm_logging
from inflight_runtime.inference.vllm_plugin.swap import Prepared, SwapPlan, plan_swap
from inflight_runtime.protocol import InitGroupRequest, WeightUpdateRequest
from inflight_runtime.weights.receiver import PausedBucketReceiver, StagedReceiver
from inflight_runtime.weights.transports.pair import PairGroup

logger = logging.getLogger(__name__)
adopt_vllm_logging()

NamedTensors = list[tuple[str, torch.Tensor]]


class IncompleteLoadError(RuntimeError):
    """The model did not take every weight it needs; what it holds now is a mix."""


@dataclass
class _Task:
    """One piece of background work."""

    number: int
    done: bool = False
    error: str = ""
    tensors: NamedTensors = field(default_factory=list)
    prepared: Prepared | None = None


@dataclass
class _State:
    pairs: dict[str, PairGroup] = field(default_factory=dict)
    receiver: StagedReceiver = field(default_factory=StagedReceiver)
    plan: SwapPlan | None = None
    planned: bool = False
    task: _Task | None = None
    started: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class InflightWorkerExtension:
    """Methods that vLLM mixes into its worker class (``--worker-extension-cls``); called by collective RPC.

    Arguments and results are strings and plain dictionaries, for they pass a serialiser.
    """

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    @property
    def inflight_state(self) -> _State:
        """This worker's groups and its current background task."""
        state: _State | None = self.__dict__.get("_inflight_state")
        if state is None:
            state = self.__dict__["_inflight_state"] = _State()
        return state

    def inflight_join(self, payload: str) -> int:
        """Start to join the group of an ``InitGroupRequest`` (JSON) as rank 1 + the worker's rank; returns the task."""
        state = self.inflight_state

        def work(task: _Task) -> None:
            request = InitGroupRequest.model_validate_json(payload)
            pair = PairGroup.join(
                address=request.master_address,
                port=request.master_port,
                tag=request.tag,
                rank=1 + self.rank,
                world_size=request.world_size,
                backend=request.backend,
                timeout_s=request.timeout_seconds,
            )
            with state.lock:
                if state.task is task:
                    state.pairs[request.tag] = pair
                    return
            pair.close()

        return self._inflight_start(work)

    def inflight_receive(self, payload: str) -> int:
        """Start to receive and verify the snapshot of a ``WeightUpdateRequest`` (JSON) into scratch memory."""
        state = self.inflight_state

        def work(task: _Task) -> None:
            request = WeightUpdateRequest.model_validate_json(payload)
            pair = state.pairs[request.tag]
            # On the host, whatever the model is on: device memory has no room for a second model.
            task.tensors = state.receiver.receive(pair, request, "cpu")
            if state.plan is not None:
                task.prepared = state.plan.prepare(dict(task.tensors))

        return self._inflight_start(work)

    def inflight_poll(self, number: int) -> dict[str, Any]:
        """Whether the background task has ended, and how."""
        task = self.inflight_state.task
        if task is None or task.number != number:
            return {"done": True, "error": "given up"}
        return {"done": task.done, "error": task.error}

    def inflight_commit(self) -> str:
        """Put the received weights in place; timings in milliseconds as JSON.

        Raises:
            RuntimeError: nothing verified is at hand (the weights are untouched).
            IncompleteLoadError: the model now holds a mix.
        """
        state = self.inflight_state
        task, state.task = state.task, None
        if task is None or not task.done or task.error or not task.tensors:
            raise RuntimeError("no verified weights to commit")
        start = time.perf_counter()
        if state.plan is not None and task.prepared is not None:
            state.plan.apply(task.prepared)
            return json.dumps({"swap_ms": 1e3 * (time.perf_counter() - start)})
        timings = self._inflight_load(task.tensors)
        if not state.planned:
            state.planned, state.plan = True, self._inflight_plan(dict(task.tensors))
        return json.dumps(timings)

    def inflight_commit_streaming(self, payload: str) -> str:
        """Receive and load bucket by bucket with the engine paused (NCCL: no second model in device memory).

        A failure leaves a mix behind: the server is broken then.
        """
        request = WeightUpdateRequest.model_validate_json(payload)
        buckets = PausedBucketReceiver().receive(self.inflight_state.pairs[request.tag], request, self.device)
        # The reload holds on to a layer's tensors until it has them all; the receiver's scratch does not live so long.
        return json.dumps(self._inflight_load((name, tensor.clone()) for bucket in buckets for name, tensor in bucket))

    def inflight_leave(self, tag: str) -> None:
        """Leave a group and forget what was received; a no-op when it is not there."""
        state = self.inflight_state
        with state.lock:
            state.task = None
            pair = state.pairs.pop(tag, None)
        if pair is not None:
            # Closing may wait for a broken connection, and the engine must not.
            threading.Thread(target=_close, args=(pair,), name="inflight-close", daemon=True).start()

    def _inflight_start(self, work: Callable[[_Task], None]) -> int:
        state = self.inflight_state
        state.started += 1
        state.task = task = _Task(state.started)

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                work(task)
            except BaseException as error:
                task.error = f"{type(error).__name__}: {error}"
            finally:
                task.done = True

        threading.Thread(target=run, name="inflight-weights", daemon=True).start()
        return task.number

    def _inflight_load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        start = time.perf_counter()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            left = untouched_layers(model)
            loaded = time.perf_counter()
            finalize_layerwise_reload(model, self.model_runner.model_config)
            if left:
                raise IncompleteLoadError(f"the model took no weights for {', '.join(left[:5])}")
            if self.device.type == "cpu":
                repack_tied_heads(model)
        return {"load_ms": 1e3 * (loaded - start), "finalize_ms": 1e3 * (time.perf_counter() - loaded)}

    def _inflight_plan(self, tensors: dict[str, torch.Tensor]) -> SwapPlan | None:
        """A faster way to commit, where there is one; the model has just been loaded from ``tensors``."""
        from vllm.config import CompilationMode  # noqa: PLC0415

        config = self.vllm_config
        if (
            self.device.type != "cpu"
            or config.parallel_config.world_size > 1
            or config.quant_config is not None
            or config.lora_config is not None
            or config.compilation_config.mode != CompilationMode.NONE  # a compiled graph holds on to its weights
        ):
            return None
        try:
            return plan_swap(self.model_runner.get_model(), tensors)
        except Exception:
            logger.exception("no swap plan; vLLM's reload is used")
            return None


def untouched_layers(model: torch.nn.Module) -> list[str]:
    """Names of layers with parameters for which a running layerwise reload has not seen a single weight.

    vLLM only logs such a layer and goes on with its old weights. A tied output head is no such layer: its parameter is
    the embedding's.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer  # noqa: PLC0415
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: PLC0415

    names = []
    tied = {id(head) for head in tied_heads(model)}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or info.load_numel > 0 or id(layer) in tied or is_deferred_attention_layer(layer):
            continue
        if info.kernel_tensors is not None and info.kernel_tensors[0]:
            names.append(name)
    return names


def tied_heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Output heads whose weight is an input embedding's (also while a reload holds the weights aside)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: PLC0415

    def weight(layer: torch.nn.Module) -> torch.Tensor | None:
        held = get_layerwise_info(layer).kernel_tensors
        return held[0].get("weight") if held is not None else getattr(layer, "weight", None)

    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in tables if isinstance(layer, ParallelLMHead)]
    shared = {id(weight(layer)) for layer in tables if not isinstance(layer, ParallelLMHead)}
    return [head for head in heads if id(weight(head)) in shared]


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Give tied output heads the new embedding: on CPU they use a repacked copy, which a reload does not renew."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    for head in tied_heads(model):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _close(pair: PairGroup) -> None:
    try:
        pair.close()
    except Exception:
        logger.exception("closing a weight-update group")
