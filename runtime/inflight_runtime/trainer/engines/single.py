"""One process, one device: a Hugging Face causal language model with AdamW.

Master weights are float32. With ``dtype: bfloat16`` the model computes under autocast; the logits that probabilities
come from are float32 in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inflight_runtime.config.roles import TrainerConfig
from inflight_runtime.trainer.batching import TrainSequence
from inflight_runtime.trainer.contract import EngineError, EngineInfo, StepStats, TokenStats
from inflight_runtime.trainer.engines.model import find_blocks, load_model, model_path, recompute
from inflight_runtime.trainer.engines.state import WHOLE, Moments, check_moments, read_state, write_state
from inflight_runtime.trainer.layout import CheckpointLayout
from inflight_runtime.trainer.logprobs import Head, next_token_stats, scaled_logits
from inflight_runtime.trainer.packing import MicroBatch, plan_step
from inflight_runtime.trainer.schedule import learning_rate

SELF_CHECK_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference between shared-prefix and plain logprobs, in nats; a mask that is ignored is off by whole nats."""


class SingleEngine:
    """Implements :class:`~inflight_runtime.trainer.contract.TrainerEngine` for one process."""

    model: Any
    optimizer: torch.optim.AdamW

    def init(self, config: TrainerConfig, resume: Path | None, step: int) -> EngineInfo:
        """See the contract."""
        if config.device == "cuda" and not torch.cuda.is_available():
            raise EngineError("trainer device is 'cuda' and torch sees no CUDA device; set it to 'cpu' or find the GPU")
        self._begin(config, torch.device(config.device), step)
        self.model = load_model(config, resume)
        self.model.to(self.device)
        info = self._describe_model()
        self._check_model(model_path(config, resume))
        if config.activation_checkpointing:
            for block in find_blocks(self.model):
                recompute(block)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.model, config)
        if resume is not None:
            self._load_state(resume / "trainer.pt")
        return info

    def forward(self, batch: MicroBatch) -> TokenStats:
        """See the contract."""
        ids = self._tensor(batch.ids)
        ends = self._tensor(batch.ends)
        order = torch.arange(ids.shape[1], device=self.device)
        mask = (order[:, None] >= order) & (order[:, None] < ends[:, None, :])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states = self.model.base_model(
                input_ids=ids,
                attention_mask=mask[:, None],
                position_ids=self._tensor(batch.positions),
                use_cache=False,
            ).last_hidden_state
            hidden = states.reshape(-1, states.shape[-1]).index_select(0, self._tensor(batch.sources))
            head = self.model.get_output_embeddings()
            stats = self._token_stats(head, hidden, self._tensor(batch.token_sources), self._tensor(batch.targets))
        return TokenStats(*stats)

    def backward(self, loss: Tensor, last: bool) -> None:
        """See the contract."""
        del last  # nothing to synchronise between ranks
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, *, skip: bool = False) -> StepStats:
        """See the contract."""
        self.step += 1
        rate = learning_rate(self.config.optimizer, self.step, self.config.steps)
        norm = float(self._clip_gradients())
        applied = not skip and norm - norm == 0.0  # finite
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepStats(grad_norm=norm, learning_rate=rate, applied=applied)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See the contract."""
        yield from self.layout.tensors(self._whole_tensors())

    def save(self, directory: Path) -> None:
        """See the contract."""
        tensors = {name: tensor.contiguous() for name, tensor in self.export_weights()}
        self._write(directory, tensors, self.optimizer.state_dict()["state"])

    def close(self) -> None:
        """See the contract."""
        self.optimizer.zero_grad(set_to_none=True)

    def _begin(self, config: TrainerConfig, device: torch.device, step: int) -> None:
        """What is to be set before the model is there; ``device``: where it is checked."""
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.device = device
        self.step = step
        self.autocast = config.model.dtype == "bfloat16"

    def _describe_model(self) -> EngineInfo:
        """Note and return the model's numbers; it may be on the meta device.

        Raises:
            EngineError: its attention window is too short, or it cannot be exported.
        """
        self.layout = CheckpointLayout(self.model)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        text = self.model.config.get_text_config()
        _check_attention_window(text, self.config.model.max_length)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return EngineInfo(parameters=count, vocab_size=self.vocab_size, hidden_size=int(text.hidden_size))

    def _check_model(self, directory: str) -> None:
        """Compare with the files in ``directory``, which it was loaded from, and shared prefixes with plain sequences.

        Raises:
            EngineError: it would be exported otherwise, or cannot be trained.
        """
        self.layout.check(Path(directory))
        try:
            self._check_shared_prefixes()
        except TypeError as error:
            raise EngineError(
                f"model {self.config.model.path} ({type(self.model).__name__}) does not take what the trainer gives "
                f"it, an attention mask and position ids: {error}"
            ) from error

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds, under the model's own names; each is whole until the next one is asked for."""
        for name, tensor in self.layout.named(self.model):
            yield name, tensor.detach()

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients to the configured norm; returns the norm before that."""
        limit = self.config.optimizer.grad_clip_norm
        return nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)

    def _write_model(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """Write ``directory/model`` in HF format, without the tokenizer."""
        # Not save_pretrained: it imports every distributed library that is installed, which takes seconds.
        model = directory / "model"
        self.model.config.save_pretrained(model)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(model)
        file = model / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod((model / "config.json").stat().st_mode)  # safetensors makes it the owner's alone

    def _write(self, directory: Path, tensors: dict[str, Tensor], moments: Moments) -> None:
        """Write a checkpoint."""
        self._write_model(directory, tensors)
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "format": WHOLE,
            "step": self.step,
            "optimizer": moments,
            "parameters": self._parameter_names(),
            "rng": rng,
        }
        write_state(directory / "trainer.pt", state)

    def _token_stats(
        self, head: Head, hidden: Tensor, token_sources: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return next_token_stats(
            hidden,
            head,
            self.vocab_size,
            token_sources,
            targets,
            temperature=self.config.temperature,
            bonus=self.config.loss.entropy_bonus != 0.0,
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _parameter_names(self) -> list[str]:
        """In the optimizer's order, which its state is keyed by."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _load_state(self, path: Path) -> None:
        state = read_state(path, WHOLE, self._parameter_names())
        if state is None:
            return
        self._load_moments(check_moments(state.get("optimizer"), self._parameter_shapes()))
        rng = state.get("rng", {})
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self.device)

    def _parameter_shapes(self) -> dict[str, Sequence[int]]:
        """In the optimizer's order."""
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].shape for name in self._parameter_names()}

    def _load_moments(self, moments: Moments) -> None:
        # The config's hyperparameters win over those that were saved.
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})

    def _check_shared_prefixes(self) -> None:
        """Compare a shared-prefix row with plain sequences: a model that ignores the mask would train on nonsense."""
        prompt, answers = [5, 3, 4], ([6, 7, 8, 9], [6, 2, 9, 7], [1, 6, 5, 3])
        # From all over the vocabulary: the first ids are often special tokens, whose huge activations drown the digits.
        rows = [(torch.tensor(prompt + answer) * 4093 + 1009) % self.vocab_size for answer in answers]
        sequences = [_probe(row, len(prompt), float(index)) for index, row in enumerate(rows)]
        (batch,) = plan_step([sequences], 64, 0.0)
        with torch.no_grad():
            shared = self.forward(batch).logprobs.cpu()
            plain = []
            for row in rows:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                    output = self.model(input_ids=row[None].to(self.device), use_cache=False)
                logprobs = scaled_logits(output.logits[0], nn.Identity(), self.config.temperature).log_softmax(-1).cpu()
                plain.append(logprobs[:-1].gather(1, row[1:, None])[len(prompt) - 1 :, 0])
        # old_logprobs carry the sequence's number, since packing sorts the sequences
        worst = max(
            float((shared[torch.from_numpy(batch.old_logprobs) == index] - expected).abs().max())
            for index, expected in enumerate(plain)
        )
        if not worst <= SELF_CHECK_TOLERANCE[self.config.model.dtype]:
            raise EngineError(
                f"model {self.config.model.path} ({type(self.model).__name__}): logprobs of sequences that share a "
                f"prefix differ by {worst:.3g} from those of plain ones; this architecture ignores the attention mask, "
                "the position ids or changes the logits after its head, and cannot be trained"
            )


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW; biases and norm scales (one-dimensional) are not decayed, as is usual."""
    settings = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def _check_attention_window(text_config: Any, max_length: int) -> None:
    window = getattr(text_config, "sliding_window", None)
    if window and getattr(text_config, "use_sliding_window", True) and max_length > window:
        raise EngineError(
            f"the model attends to a sliding window of {window} tokens and max_length is {max_length}: shared prefixes "
            "need full attention; lower the job's maximum length to the window or use another model"
        )


def _probe(row: Tensor, prompt: int, number: float) -> TrainSequence:
    ids = row.numpy().astype("int32")
    sampled = torch.arange(prompt, len(ids)).numpy()
    return TrainSequence(ids, sampled, torch.full((len(sampled),), number).numpy(), 1.0, 1.0)
