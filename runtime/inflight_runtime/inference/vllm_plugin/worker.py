"""What runs inside vLLM's workers: receive in a thread while the engine generates, put in place by one call.

Loading goes through vLLM's layerwise reload: plain ``load_weights`` corrupts the model on CPU, where linear weights are
repacked after loading. On CPU later updates are prepared in the thread and swapped in (:mod:`.swap`). Nothing here may
block an RPC for long: while a call runs, the engine does not generate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from inflight_runtime.inference.vllm_plugin.control import ControlServer, commit_report
from inflight_runtime.inference.vllm_plugin.logs import adopt_vllm_logging
from inflight_runtime.inference.vllm_plugin.swap import Prepared, SwapPlan, plan_swap
from inflight_runtime.protocol import InitGroupRequest, WeightUpdateRequest
from inflight_runtime.weights.errors import WeightTransferError
from inflight_runtime.weights.receiver import PausedBucketReceiver, StagedReceiver
from inflight_runtime.weights.transports.pair import PairGroup

logger = logging.getLogger(__name__)
adopt_vllm_logging()
# It writes two lines for every pause.
logging.getLogger("vllm.v1.core.sched.scheduler").setLevel(logging.WARNING)

NamedTensors = list[tuple[str, torch.Tensor]]


class IncompleteLoadError(RuntimeError):
    """The model did not take every weight it needs; what it holds now is a mix."""


@dataclass
class _Staged:
    """A verified snapshot in scratch memory."""

    number: int
    tensors: NamedTensors
    prepared: Prepared | None


@dataclass
class _State:
    pairs: dict[str, PairGroup] = field(default_factory=dict)
    joining: dict[str, object] = field(default_factory=dict)
    receiver: StagedReceiver = field(default_factory=StagedReceiver)
    staged: _Staged | None = None
    plan: SwapPlan | None = None
    planned: bool = False
    control: ControlServer | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class InflightWorkerExtension:
    """Methods that vLLM mixes into its worker class (``--worker-extension-cls``).

    ``inflight_listen`` and the commits are called by collective RPC, on the engine's own thread; joining, receiving and
    leaving come over the control socket, on threads beside it.
    """

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    @property
    def inflight_state(self) -> _State:
        """This worker's groups and what it has received."""
        state: _State | None = self.__dict__.get("_inflight_state")
        if state is None:
            state = self.__dict__["_inflight_state"] = _State()
        return state

    def inflight_listen(self) -> str:
        """Open the control socket; its path."""
        state = self.inflight_state
        state.control = ControlServer(
            {"join": self.inflight_join, "receive": self.inflight_receive, "leave": self.inflight_leave}
        )
        return state.control.path

    def inflight_join(self, payload: str) -> None:
        """Join the group of an ``InitGroupRequest`` (JSON) as rank 1 + the worker's rank.

        Raises:
            WeightTransferError: the others did not come in time.
        """
        state, request, ticket = self.inflight_state, InitGroupRequest.model_validate_json(payload), object()
        with state.lock:
            state.joining[request.tag] = ticket
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
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
            if state.joining.pop(request.tag, None) is ticket:
                state.pairs[request.tag] = pair
                return
        pair.close()
        raise WeightTransferError(f"group {request.tag!r} was left before it was complete")

    def inflight_receive(self, payload: str, number: int) -> bool:
        """Receive and verify the snapshot of a ``WeightUpdateRequest`` (JSON) in scratch memory.

        Args:
            payload: the request.
            number: names the snapshot to the commit.

        Returns:
            Whether it will be swapped in.

        Raises:
            WeightTransferError: it did not arrive as announced; nothing was touched.
        """
        state, request = self.inflight_state, WeightUpdateRequest.model_validate_json(payload)
        pair = state.pairs.get(request.tag)
        if pair is None:
            raise WeightTransferError(f"not in group {request.tag!r}")
        # On the host, whatever the model is on: device memory has no room for a second model.
        tensors = state.receiver.receive(pair, request, "cpu")
        prepared = state.plan.prepare(dict(tensors)) if state.plan is not None else None
        with state.lock:
            if state.pairs.get(request.tag) is not pair:
                raise WeightTransferError(f"group {request.tag!r} was left while it received")
            state.staged = _Staged(number, tensors, prepared)
        return prepared is not None

    def inflight_leave(self, tag: str) -> None:
        """Leave a group and forget what was received; a no-op when it is not there."""
        state = self.inflight_state
        with state.lock:
            state.staged = None
            state.joining.pop(tag, None)
            pair = state.pairs.pop(tag, None)
        if pair is not None:
            pair.close()

    def inflight_commit(self, number: int) -> float:
        """Put the received weights in place; the time it took in milliseconds.

        Raises:
            RuntimeError: nothing verified is at hand (the weights are untouched).
            IncompleteLoadError: the model now holds a mix.
        """
        state = self.inflight_state
        with state.lock:
            staged, state.staged = state.staged, None
        if staged is None or staged.number != number:
            raise RuntimeError("no verified weights to commit")
        start = time.perf_counter()
        if state.plan is not None and staged.prepared is not None:
            state.plan.apply(staged.prepared)
        else:
            self._inflight_load(staged.tensors)
            if not state.planned:
                state.planned, state.plan = True, self._inflight_plan(dict(staged.tensors))
        return 1e3 * (time.perf_counter() - start)

    def inflight_commit_or_die(self, number: int) -> float:
        """The same where the engine is resumed without waiting for the outcome: a failure ends the engine's life.

        The outcome is reported over the control socket too: the engine's own answer is sent by a thread that waits
        while the next step is prepared.

        Raises:
            Exception: whatever went wrong; the next engine step raises as well, so nothing is sampled from a mix.
        """
        try:
            took = self.inflight_commit(number)
        except BaseException as error:
            reason = f"the weights are mixed: {error}"

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError(reason)

            self.model_runner.execute_model = refuse
            raise
        if (control := self.inflight_state.control) is not None:
            control.report(commit_report(number), took)
        return took

    def inflight_commit_streaming(self, payload: str) -> float:
        """Receive and load bucket by bucket with the engine paused (NCCL: no second model in device memory).

        A failure leaves a mix behind: the server is broken then.
        """
        start = time.perf_counter()
        request = WeightUpdateRequest.model_validate_json(payload)
        buckets = PausedBucketReceiver().receive(self.inflight_state.pairs[request.tag], request, self.device)
        # The reload holds on to a layer's tensors until it has them all; the receiver's scratch does not live so long.
        self._inflight_load((name, tensor.clone()) for bucket in buckets for name, tensor in bucket)
        return 1e3 * (time.perf_counter() - start)

    def _inflight_load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.device.type == "cpu":
                forget_expert_kernels(model)
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            left = untouched_layers(model)
            finalize_layerwise_reload(model, self.model_runner.model_config)
            if left:
                raise IncompleteLoadError(f"the model took no weights for {', '.join(left[:5])}")
            if self.device.type == "cpu":
                repack_tied_heads(model)

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


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Let a reload repack experts: vLLM packs them for its CPU kernel when it makes that kernel, and never again."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: PLC0415
        UnquantizedFusedMoEMethod,
    )

    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None
