"""The reference engine's half of a weight update: receive beside the engine, copy between two tokens."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor, nn

from inflight_runtime.inference.checkpoint_names import ExpectedTensors, UnknownCheckpointError
from inflight_runtime.inference.reference.engine import Engine
from inflight_runtime.inference.reference.faults import Faults, die
from inflight_runtime.inference.service import ContractError
from inflight_runtime.protocol import InitGroupRequest, WeightUpdateRequest
from inflight_runtime.types import Version
from inflight_runtime.weights.receiver import StagedReceiver
from inflight_runtime.weights.threads import in_thread
from inflight_runtime.weights.transports.pair import PairGroup

Tensors = list[tuple[str, Tensor]]


class InjectedFaultError(RuntimeError):
    """A fault switch is on."""


class ModelWeights:
    """The model's parameters under checkpoint names.

    Raises:
        UnknownCheckpointError: the model that transformers built has not the checkpoint's names.
    """

    def __init__(self, model: nn.Module, expected: ExpectedTensors) -> None:
        self.expected = expected
        state = model.state_dict()
        if strange := [name for name in expected.required if name not in state]:
            raise UnknownCheckpointError(
                f"the reference engine cannot take updates for this model: transformers renames {strange[0]!r}; "
                "use engine vllm"
            )
        self._parameters = {name: state[name] for name in expected.required}

    @torch.no_grad()
    def load(self, tensors: Tensors, *, stop_after: int | None = None) -> None:
        """Copy tensors of the right names and shapes into place, converting the dtype; a tied head is left alone.

        Args:
            tensors: what :meth:`ExpectedTensors.problem` has passed.
            stop_after: fault switch, fail after this many.

        Raises:
            InjectedFaultError: ``stop_after`` tensors are in place.
        """
        for count, (name, tensor) in enumerate(tensors):
            if count == stop_after:
                raise InjectedFaultError(f"fault switch: the commit stops after {count} of {len(tensors)} tensors")
            if name in self._parameters:
                self._parameters[name].copy_(tensor)


class FaultyPair(PairGroup):
    """A pair whose receiving side fails as the switches say."""

    faults = Faults()

    def broadcast(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """See :meth:`PairGroup.broadcast`."""
        super().broadcast(tensor, timeout_s)
        if self.faults.die_in_transfer:
            die()
        if self.faults.corrupt_receive:
            tensor.view(torch.uint8)[0] ^= 1


class ReferencePort:
    """Implements :class:`~inflight_runtime.inference.service.WeightPort`."""

    def __init__(self, engine: Engine, weights: ModelWeights, faults: Faults) -> None:
        self._engine = engine
        self._weights = weights
        self._faults = faults
        self._receiver = StagedReceiver()
        self._pairs: dict[str, PairGroup] = {}

    async def join(self, request: InitGroupRequest) -> None:
        """Join as rank 1."""
        if request.backend != "gloo":
            raise ContractError(
                400, f"backend {request.backend!r}: the reference engine runs on the CPU and takes gloo"
            )
        pair = await in_thread(
            lambda: FaultyPair.join(
                address=request.master_address,
                port=request.master_port,
                tag=request.tag,
                rank=1,
                world_size=request.world_size,
                backend="gloo",
                timeout_s=request.timeout_seconds,
            )
        )
        assert isinstance(pair, FaultyPair)
        pair.faults = self._faults
        self._pairs[request.tag] = pair

    async def leave(self, tag: str) -> None:
        """Close the pair; a receive over it ends with an error on the other side."""
        pair = self._pairs.pop(tag, None)
        if pair is not None:
            await in_thread(pair.close)

    async def check(self, request: WeightUpdateRequest) -> None:
        """Refuse names and shapes that are not the model's."""
        if problem := self._weights.expected.problem(request.tensors):
            raise ContractError(400, f"version {request.epoch}.{request.step} does not fit the model: {problem}")

    async def receive(self, request: WeightUpdateRequest) -> Tensors:
        """Receive and verify in a thread of its own."""
        pair = self._pairs[request.tag]
        tensors = await in_thread(lambda: self._receiver.receive(pair, request))
        if self._faults.delay_update_s:
            await asyncio.sleep(self._faults.delay_update_s)
        return tensors

    async def pause(self) -> None:
        """Stop between two tokens."""
        await self._engine.pause()

    async def commit(self, staged: Tensors) -> None:
        """Copy on the engine's own thread."""
        stop_after = len(staged) // 2 if self._faults.refuse_commit else None
        await self._engine.call(lambda: self._weights.load(staged, stop_after=stop_after))

    async def set_version(self, version: Version) -> None:
        """Label what is sampled from now on."""
        await self._engine.set_version(version)

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()

    async def abort_all(self, reason: str) -> None:
        """End every request."""
        await self._engine.abort_all(reason)
