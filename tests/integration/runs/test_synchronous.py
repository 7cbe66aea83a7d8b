"""`maxStaleness: 0` is synchronous RL: the asynchronous run equals a plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inflight_runtime.actor.loading import load_environment
from inflight_runtime.actor.tokenizer import load_tokenizer
from inflight_runtime.actor.tokens import sampling_seed
from inflight_runtime.config.roles import ActorConfig, TrainerConfig
from inflight_runtime.coordinator.client import StepBatch
from inflight_runtime.inference.reference.decoder import load_model
from inflight_runtime.inference.reference.sampling import generate_one
from inflight_runtime.trainer.batching import build_step
from inflight_runtime.trainer.engines.single import SingleEngine
from inflight_runtime.trainer.losses import policy_loss
from inflight_runtime.trainer.packing import attention_cost, plan_step
from inflight_runtime.types import Attempt, Group, Span, make_segment
from support.runs import local_run, sort_letters_job, watch_outstanding

STEPS = 4
GROUPS = 4


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the roles: sums of floats depend on how they are split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_loop(
    trainer: TrainerConfig, actor: ActorConfig, first_group: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Generate, reward, step; generate with the new weights. No processes, no buffer, no versions in flight."""
    environment = load_environment(actor.environment)
    tokenizer = load_tokenizer(actor.model)
    eos = {tokenizer.hf.eos_token_id}
    engine = SingleEngine()
    info = engine.init(trainer, None, 0)
    policy = load_model(Path(actor.model.path), "float32")
    rewards: list[float] = []
    for step in range(1, trainer.steps + 1):
        policy.load_state_dict(dict(engine.export_weights()), strict=False)
        groups = []
        for position in range((step - 1) * GROUPS, step * GROUPS):
            group_id = first_group + position
            problem = environment.problem(position)
            prompt = tokenizer.encode(tokenizer.render(environment.messages(problem), {}))
            attempts = []
            for number in range(actor.group_size):
                seed = sampling_seed(actor.sampling.seed, group_id, number, 0)
                ids, logprobs = generate_one(
                    policy, prompt, actor.sampling.max_tokens, actor.sampling.temperature, seed, eos
                )
                text = tokenizer.decode(ids, special=False)
                reward = sort_reward(problem, text, stopped=ids[-1] in eos)
                rewards.append(reward)
                span = Span(1, step - 1, 0, len(ids), "plain", "plain")
                segment = make_segment(ids, [True] * len(ids), logprobs, [span])
                attempts.append(Attempt((segment,), reward))
            groups.append(Group(group_id, 1, position, np.asarray(prompt, np.int32), tuple(attempts)))
        data = build_step(StepBatch(step, step - 1, GROUPS, {}, groups), trainer)
        batches = plan_step(data.sequences, trainer.micro_batch_tokens, attention_cost(info.hidden_size))
        for index, batch in enumerate(batches):
            stats = engine.forward(batch)
            loss, _ = policy_loss(
                stats.logprobs,
                torch.as_tensor(batch.old_logprobs),
                torch.as_tensor(batch.advantages),
                torch.as_tensor(batch.weights),
                trainer.loss,
                entropy=stats.entropy,
                entropy_sample=stats.entropy_sample,
            )
            engine.backward(loss, last=index == len(batches) - 1)
        engine.optimizer_step()
    return {name: tensor.clone() for name, tensor in engine.export_weights()}, rewards


def sort_reward(problem: str, text: str, *, stopped: bool) -> float:
    """The example's reward, written out once more."""
    right = "".join(sorted(problem))
    if not stopped:
        return 0.0
    placed = sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right))
    return 0.5 * placed + 0.5 * (text == right)


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_staleness_equals_the_plain_synchronous_loop_bit_for_bit(
    letters_model: Path, tmp_path: Path
) -> None:
    job = sort_letters_job(
        letters_model, steps=STEPS, promptsPerStep=GROUPS, groupSize=8, maxStaleness=0, zeroVariance="keep", seed=7
    )
    job["spec"]["logging"] = {"rolloutsPerStep": 1000}
    with local_run(job, tmp_path) as run:
        watch_outstanding(run, bound=GROUPS)
        run.succeed()
        assert max(record["staleness_max"] for record in run.metrics()) == 0
        trainer = TrainerConfig.model_validate_json((run.directory / "config" / "trainer.json").read_text())
        actor = ActorConfig.model_validate_json((run.directory / "config" / "actor-0.json").read_text())
        lines = run.rollouts()
    weights, rewards = plain_loop(trainer, actor, first_group=min(line["group"] for line in lines))
    assert [line["reward"] for line in lines] == rewards
    assert len(set(rewards)) > 1
    newest = trainer.checkpoint.dir / (trainer.checkpoint.dir / "LATEST").read_text().strip()
    trained = load_file(newest / "model" / "model.safetensors")
    assert set(weights) == set(trained)
    different = [name for name in weights if not torch.equal(weights[name], trained[name])]
    assert not different
    start = load_file(letters_model / "model.safetensors")
    assert not all(torch.equal(start[name], trained[name]) for name in trained), "nothing was trained"
