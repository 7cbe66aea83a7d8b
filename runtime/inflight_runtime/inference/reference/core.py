"""What the routes share: the model's parts, and requests turned into engine jobs and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig

from inflight_runtime.config.roles import InferenceConfig
from inflight_runtime.inference.checkpoint_names import UnknownCheckpointError, read_expected_tensors
from inflight_runtime.inference.reference.decoder import decoder_for
from inflight_runtime.inference.reference.engine import Answer, Engine, Job, TokenListener
from inflight_runtime.inference.reference.faults import Faults
from inflight_runtime.inference.reference.port import ModelWeights, ReferencePort
from inflight_runtime.inference.reference.stops import stop_check
from inflight_runtime.inference.service import ContractError, UpdateService
from inflight_runtime.protocol import Completion, WireSpan


class ReferenceServer:
    """The parts of one server and what its routes share.

    Raises:
        UnknownCheckpointError: the model directory holds nothing that this engine can serve.
    """

    def __init__(self, config: InferenceConfig, token: str, model: nn.Module, tokenizer: Any) -> None:
        self.config = config
        self.token = token
        self.tokenizer = tokenizer
        self.faults = Faults.model_validate(config.faults)
        model_config: Any = model.config
        longest = getattr(model_config, "max_position_embeddings", config.model.max_length)
        if config.model.max_length > longest:
            raise UnknownCheckpointError(
                f"maximum length {config.model.max_length} is over the model's {longest} positions: lower it"
            )
        self._vocabulary = int(model_config.vocab_size)
        self.eos_ids = eos_ids(Path(config.model.path), tokenizer)
        self.engine = Engine(
            decoder_for(model),
            max_concurrent=config.max_concurrent,
            kv_cache=config.kv_cache,
            seed=config.seed,
            slow_token_s=self.faults.slow_token_s,
            on_failure=self._on_engine_failure,
        )
        weights = ModelWeights(model, read_expected_tensors(Path(config.model.path)))
        self.service = UpdateService(
            config, ReferencePort(self.engine, weights, self.faults), engine="reference", load=self.engine.load
        )

    def _on_engine_failure(self, reason: str) -> None:
        self.service.mark_broken(reason)

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        n: int,
        max_tokens: int | None,
        temperature: float,
        stop: list[str],
        stop_token_ids: Iterable[int] = (),
        seeds: list[int] | None = None,
        ignore_eos: bool = False,
        listener: TokenListener | None = None,
    ) -> list[Answer]:
        """Sample ``n`` answers.

        Args:
            prompt_ids: at least one and fewer than the model's length.
            n: how many answers.
            max_tokens: bound of each, clipped to what fits; ``None``: as many as fit.
            temperature: 0 takes the likeliest token.
            stop: texts that end an answer.
            stop_token_ids: tokens that end an answer, also under ``ignore_eos``.
            seeds: one for each answer.
            ignore_eos: go on after an end-of-sequence token.
            listener: called from the engine's thread for each token.

        Raises:
            ContractError: 400, or 503 when the engine has ended the request.
            EngineError: the same, from inside the engine.
        """
        room = self.config.model.max_length - len(prompt_ids)
        if not prompt_ids:
            raise ContractError(400, "the prompt has no tokens")
        if room < 1:
            raise ContractError(
                400,
                f"prompt of {len(prompt_ids)} tokens: the model takes {self.config.model.max_length}, "
                "prompt and answer together",
            )
        if strange := [token for token in prompt_ids if not 0 <= token < self._vocabulary]:
            raise ContractError(400, f"prompt token {strange[0]} is not in the vocabulary of {self._vocabulary}")
        if seeds is not None and len(seeds) != n:
            raise ContractError(400, f"{len(seeds)} seeds for {n} answers: send one for each, or none")
        job = Job(
            prompt_ids=prompt_ids,
            answers=self.engine.make_answers(n, seeds),
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            temperature=temperature,
            stop_ids=frozenset(stop_token_ids) | (frozenset() if ignore_eos else self.eos_ids),
            stopped=stop_check(self.tokenizer, stop),
            listener=listener,
        )
        await self.engine.generate(job)
        return job.answers


def completion(answer: Answer) -> Completion:
    """An answer on the wire; runs of tokens of one version become spans."""
    spans: list[WireSpan] = []
    start = 0
    for end in range(1, len(answer.ids) + 1):
        version = answer.versions[start]
        if end == len(answer.ids) or answer.versions[end] != version:
            assert version is not None, "generate is refused before the first version"
            spans.append(WireSpan(epoch=version.epoch, step=version.step, start=start, end=end))
            start = end
    return Completion(ids=answer.ids, logprobs=answer.logprobs, spans=spans, finish=answer.finish or "abort")


def eos_ids(directory: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the tokenizer and of ``generation_config.json``."""
    found = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):
        configured = GenerationConfig.from_pretrained(str(directory)).eos_token_id
        found |= set(configured) if isinstance(configured, list) else {configured}
    return frozenset(token for token in found if token is not None)
