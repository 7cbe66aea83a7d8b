"""What the contract suite cannot ask of every engine: vLLM's caches, routes, plugins and processes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib import request as urlrequest

import psutil
import pytest
import torch

from inflight_runtime.protocol import GenerateReply
from support.coordinators import coordinator, coordinator_config
from support.mixed_weights import kept_cache_logprobs
from support.models import smollm2_model
from support.ports import free_port
from support.servers import RunningServer, make_config, start_server
from support.tiny_models import MAX_LENGTH, make_tiny_model
from support.trainer_side import TrainerSide, hf_logprobs, in_background, load_hf

TOLERANCE = 1e-5
PLAIN_DIFFERENCE = 1e-3
"""Far above rounding: the weights were others."""
DEADLINE_S = 90.0
VLLM = pytest.mark.parametrize("started", ["vllm"], indirect=True)
OPEN_ROUTES = {"/health", "/ping", "/metrics", "/healthz", "/readyz"}


def generate(server: RunningServer, prompt: list[int], **fields: Any) -> GenerateReply:
    body = {"prompt_ids": prompt, "max_tokens": 16, "ignore_eos": True} | fields
    status, reply = server.call("POST", "/runtime/v1/generate", body, timeout_s=DEADLINE_S)
    assert status == 200, reply
    return GenerateReply.model_validate(reply)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def counter(server: RunningServer, name: str) -> int:
    """One of vLLM's own counters."""
    _, text = server.call("GET", "/metrics")
    found = re.search(rf"^vllm:{name}\{{.*\}} ([\d.e+]+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


def let_all_sample(server: RunningServer, sequences: int) -> None:
    """Wait until that many running sequences have had time for a token each."""
    enough = counter(server, "generation_tokens_total") + 2 * sequences
    wait_until(lambda: counter(server, "generation_tokens_total") >= enough)


def fresh_prompt(length: int) -> list[int]:
    """Random ids, so that nothing of it is in any cache."""
    return [random.randrange(256) for _ in range(length)]


# --- versions ---------------------------------------------------------------------------------------------------------


@VLLM
def test_every_version_switch_of_every_request_is_at_the_token_that_its_spans_name(
    trainer: TrainerSide, qwen: Any
) -> None:
    """Prompts, lengths and starts differ; old KV is kept. Moving any boundary by one token would show."""
    server, count = trainer.server, 12
    trainer.push(qwen.loaded[0], 0)
    wait_until(lambda: server.status()["running"] == 0)
    prompts = [fresh_prompt(5 + 3 * number) for number in range(count)]
    lengths = [MAX_LENGTH - len(prompt) - 7 * number for number, prompt in enumerate(prompts)]
    calls = [
        in_background(lambda p=prompt, n=length: generate(server, p, max_tokens=n))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    wait_until(lambda: server.status()["running"] == count)
    for step in (1, 2, 3):
        trainer.push(qwen.loaded[step], step)
        let_all_sample(server, count)
    for prompt, length, call in zip(prompts, lengths, calls, strict=True):
        (answer,) = call.result(DEADLINE_S).completions
        assert (len(answer.ids), answer.finish) == (length, "length")
        assert [(span.epoch, span.step) for span in answer.spans] == [(trainer.epoch, step) for step in range(4)]
        found = torch.tensor(answer.logprobs)
        stretches = [(qwen.loaded[span.step], span.end) for span in answer.spans]
        assert (found - kept_cache_logprobs(stretches, prompt, answer.ids)).abs().max() < TOLERANCE
        for boundary in range(3):
            for shift in (-1, 1):
                moved = [(model, end + shift * (index == boundary)) for index, (model, end) in enumerate(stretches)]
                assert (found - kept_cache_logprobs(moved, prompt, answer.ids)).abs().max() > PLAIN_DIFFERENCE


@VLLM
def test_updates_after_the_first_are_swapped_in(trainer: TrainerSide, qwen: Any) -> None:
    """That they are right is for the tests above; this one is for what they went by."""
    for step in range(2):
        trainer.push(qwen.loaded[step], step)
    log = trainer.server.log_path.read_text()
    assert log.count("are swapped in") == 1
    assert "no swap plan" not in log


@pytest.fixture(scope="module")
def recomputing(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that drops running requests' KV at each update and splits long prompts, beside a real coordinator."""
    directory = tmp_path_factory.mktemp("recompute")
    with coordinator(directory, coordinator_config(directory, port=free_port())) as running:
        config = make_config(
            directory,
            qwen.directories[0],
            kv_cache="recompute",
            coordinator_url=running.url,
            heartbeat_s=0.1,
            engine_args={"enable-chunked-prefill": True, "max-num-batched-tokens": 256},
        )
        with start_server(config, directory / "server.log") as server:
            yield server


def test_with_recompute_later_tokens_are_those_of_a_full_pass_under_the_new_weights(
    recomputing: RunningServer, qwen: Any
) -> None:
    with TrainerSide(recomputing) as trainer:
        trainer.join().push(qwen.loaded[0], 0)
        prompts = [fresh_prompt(20) for _ in range(4)]
        calls = [in_background(lambda p=prompt: generate(recomputing, p, max_tokens=400)) for prompt in prompts]
        wait_until(lambda: recomputing.status()["running"] == 4)
        trainer.push(qwen.loaded[1], 1)
        for prompt, call in zip(prompts, calls, strict=True):
            (answer,) = call.result(DEADLINE_S).completions
            assert [span.step for span in answer.spans] == [0, 1]
            found, switch = torch.tensor(answer.logprobs), answer.spans[0].end
            for model, part in zip(qwen.loaded, (slice(0, switch), slice(switch, 400)), strict=False):
                assert (found - hf_logprobs(model, prompt, answer.ids))[part].abs().max() < TOLERANCE


# --- prefix cache -----------------------------------------------------------------------------------------------------


def cached_tokens(server: RunningServer) -> int:
    """Prompt tokens that vLLM has taken from its prefix cache so far."""
    return counter(server, "prefix_cache_hits_total")


def openai_completion(server: RunningServer, prompt: list[int], **fields: Any) -> None:
    body = {"model": "policy", "prompt": prompt, "max_tokens": 1} | fields
    status, reply = server.call("POST", "/v1/completions", body)
    assert status == 200, reply


@VLLM
def test_prefixes_are_shared_within_a_version_and_never_across(trainer: TrainerSide, qwen: Any) -> None:
    server = trainer.server
    prompt = fresh_prompt(70)  # two whole blocks of 32

    def hits(ask: Callable[[], object]) -> int:
        before = cached_tokens(server)
        ask()
        return cached_tokens(server) - before

    by_generate = lambda: generate(server, prompt, max_tokens=1)  # noqa: E731
    by_openai = lambda: openai_completion(server, prompt)  # noqa: E731
    for step, (first, second) in enumerate([(by_generate, by_openai), (by_openai, by_generate)]):
        trainer.push(qwen.loaded[step], step)
        assert hits(first) == 0
        assert hits(second) == 64
        assert hits(by_generate) == 64
    # What the client keeps apart stays apart.
    assert hits(lambda: openai_completion(server, prompt, cache_salt="mine")) == 0
    assert hits(lambda: openai_completion(server, prompt, cache_salt="mine")) == 64


@VLLM
def test_the_attempts_of_a_group_share_their_prompt(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    before = cached_tokens(trainer.server)
    generate(trainer.server, fresh_prompt(70), n=8, max_tokens=2)
    assert cached_tokens(trainer.server) - before == 7 * 64


# --- seeds ------------------------------------------------------------------------------------------------------------


@VLLM
def test_seeded_groups_that_fill_more_than_one_step_are_all_answered_and_reproducible(
    trainer: TrainerSide, qwen: Any
) -> None:
    """vLLM's CPU engine dies when a seeded prompt is split over two steps."""
    trainer.push(qwen.loaded[0], 0)
    prompts = [fresh_prompt(300) for _ in range(16)]

    def ask(number: int) -> list[list[int]]:
        seeds = list(range(10 * number, 10 * number + 4))
        return [answer.ids for answer in generate(trainer.server, prompts[number], n=4, seeds=seeds).completions]

    first = [call.result(DEADLINE_S) for call in [in_background(lambda n=n: ask(n)) for n in range(16)]]
    assert [ask(number) for number in range(16)] == first
    assert len({tuple(ids) for answers in first for ids in answers}) == 64


def test_with_split_prompts_switched_on_seeds_are_dropped_rather_than_deadly(
    recomputing: RunningServer, qwen: Any
) -> None:
    with TrainerSide(recomputing) as trainer:
        trainer.join().push(qwen.loaded[0], 0)
        calls = [
            in_background(lambda n=n: generate(recomputing, fresh_prompt(300), n=4, seeds=[n, n + 1, n + 2, n + 3]))
            for n in range(16)
        ]
        assert sum(len(call.result(DEADLINE_S).completions) for call in calls) == 64
        body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 2, "seed": 5}
        assert recomputing.call("POST", "/v1/completions", body)[0] == 200


# --- doors ------------------------------------------------------------------------------------------------------------


@VLLM
def test_every_route_of_the_server_asks_for_the_token(server: RunningServer) -> None:
    _, document = server.call("GET", "/openapi.json")
    routes = {path: sorted(methods) for path, methods in document["paths"].items()}
    assert {"/v1/chat/completions", "/invocations", "/tokenize"} <= set(routes)
    for path, methods in routes.items():
        if path in OPEN_ROUTES:
            continue
        for method in methods:
            body = {} if method == "post" else None
            assert server.call(method.upper(), path, body, headers={})[0] == 401, path


@VLLM
def test_the_token_is_not_in_any_command_line(server: RunningServer) -> None:
    main = psutil.Process(server.process.pid)
    lines = [" ".join(process.cmdline()) for process in (main, *main.children(recursive=True))]
    assert "inflight_runtime.inference.vllm_server" in lines[0]
    assert not [line for line in lines if server.token in line]


@VLLM
def test_routes_that_change_weights_behind_the_versions_back_are_not_there(server: RunningServer) -> None:
    for path in ("/update_weights", "/collective_rpc", "/pause", "/sleep"):
        assert server.call("POST", path, {})[0] == 404


# --- life and death ---------------------------------------------------------------------------------------------------


def members(server: RunningServer) -> list[dict[str, Any]]:
    call = urlrequest.Request(server.config.coordinator_url + "/v1/members", headers=server.headers)
    with urlrequest.urlopen(call, timeout=DEADLINE_S) as reply:
        return list(json.loads(reply.read())["members"])


def test_the_server_is_a_member_until_it_is_told_to_end_and_then_ends_at_once(
    recomputing: RunningServer, qwen: Any
) -> None:
    """Last of the tests on this server: it ends it."""
    wait_until(lambda: len(members(recomputing)) == 1)
    (member,) = members(recomputing)
    status = recomputing.status()
    assert {name: member[name] for name in ("server_id", "boot_id", "engine", "capacity", "max_length")} == {
        name: status[name] for name in ("server_id", "boot_id", "engine", "capacity", "max_length")
    }
    assert member["url"] == recomputing.url
    with TrainerSide(recomputing) as trainer:
        trainer.join().push(qwen.loaded[2], 0)
        unfinished = in_background(lambda: generate(recomputing, fresh_prompt(5), n=32, max_tokens=500))
        wait_until(lambda: recomputing.status()["running"] == 32)
        recomputing.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not members(recomputing))
        recomputing.process.wait(15)
        with contextlib.suppress(Exception):
            unfinished.result(DEADLINE_S)
        assert unfinished.done()


FAULT = '''
"""A vLLM general plugin: each update goes by vLLM's reload, and a layer's weights are forgotten once a file exists."""
import os

def register():
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    load = Qwen2ForCausalLM.load_weights

    def forgetful(self, weights):
        if os.path.exists(os.environ["FORGET_FLAG"]):
            weights = [(name, tensor) for name, tensor in weights if "layers.1.mlp.down_proj" not in name]
        return load(self, weights)

    Qwen2ForCausalLM.load_weights = forgetful
    Qwen2ForCausalLM.packed_modules_mapping = {}
'''


def write_plugin(directory: Path) -> None:
    """An installed distribution as far as entry points go."""
    (directory / "forgetful_fault.py").write_text(FAULT)
    info = directory / "forgetful_fault-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful-fault\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nforgetful = forgetful_fault:register\n")


def test_weights_that_did_not_all_get_in_are_never_served(qwen: Any, tmp_path: Path) -> None:
    """The plugin that causes it also shows that the user's own plugins are loaded beside ours."""
    write_plugin(tmp_path)
    flag = tmp_path / "flag"
    env = {"PYTHONPATH": str(tmp_path), "FORGET_FLAG": str(flag)}
    config = make_config(tmp_path, qwen.directories[0])
    with start_server(config, tmp_path / "server.log", env=env) as server, TrainerSide(server) as trainer:
        trainer.join().push(qwen.loaded[1], 0)
        trainer.push(qwen.loaded[0], 1)
        assert "no swap plan" in server.log_path.read_text()
        (answer_before,) = generate(server, [1, 2, 3], max_tokens=20).completions
        before = torch.tensor(answer_before.logprobs)
        assert (before - hf_logprobs(qwen.loaded[0], [1, 2, 3], answer_before.ids)).abs().max() < TOLERANCE
        caught = in_background(lambda: generate(server, fresh_prompt(5), n=4, max_tokens=500))
        wait_until(lambda: server.status()["running"] == 4)
        flag.touch()
        snapshot = trainer.snapshot(qwen.loaded[1], 2)
        answer = in_background(lambda: trainer.request(trainer.update_body(snapshot)))
        trainer.send(snapshot)
        code, reply = answer.result(DEADLINE_S)
        assert code == 503
        assert "layers.1.mlp.down_proj" in reply["error"]
        # What was in flight ends with what the old weights sampled, and is retried by its client.
        for completion in caught.result(DEADLINE_S).completions:
            assert completion.finish == "abort"
            assert [span.step for span in completion.spans] == [1]
        status = server.status()
        assert "layers.1.mlp.down_proj" in status["broken"]
        assert status["version"]["step"] == 1
        flag.unlink()
        chat = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, body in (
            ("/runtime/v1/generate", {"prompt_ids": [1], "max_tokens": 1}),
            ("/v1/completions", {"model": "policy", "prompt": [1], "max_tokens": 1}),
            ("/v1/chat/completions", chat),
            ("/request_weight_update", trainer.update_body(trainer.snapshot(qwen.loaded[2], 3))),
        ):
            code, reply = server.call("POST", path, body)
            assert (code, "restarted" in json.dumps(reply)) == (503, True), path
        # An engine that dies takes its server along: somebody must start it anew.
        main = psutil.Process(server.process.pid)
        (engine,) = [process for process in main.children(recursive=True) if "EngineCore" in "".join(process.cmdline())]
        engine.kill()
        server.process.wait(30)


# --- a real model -----------------------------------------------------------------------------------------------------


def test_smollm2_has_the_trainers_weights_after_an_update(tmp_path: Path) -> None:
    """A real, tied model: maximum 1e-4, mean 2e-5 in float32, on the pretrained weights and after a step away."""
    directory = smollm2_model()
    config = make_config(tmp_path, directory, cpu_kv_cache_bytes=256 * 1024 * 1024, update_deadline_s=60.0)
    model = load_hf(directory)
    prompt = [random.randrange(1000, 40000) for _ in range(12)]
    with (
        start_server(config, tmp_path / "server.log") as server,
        TrainerSide(server, bucket_bytes=64 * 1024 * 1024, timeout_s=60.0) as trainer,
    ):
        trainer.join()
        for step in range(2):
            if step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
            trainer.push(model, step)
            assert "are swapped in" in server.log_path.read_text()
            for answer in generate(server, prompt, n=4, max_tokens=24).completions:
                difference = (torch.tensor(answer.logprobs) - hf_logprobs(model, prompt, answer.ids)).abs()
                assert difference.max() < 1e-4
                assert difference.mean() < 2e-5


def test_a_mixture_of_experts_has_the_trainers_weights_after_each_update(tmp_path: Path) -> None:
    """Its experts travel one by one, as the checkpoint has them; vLLM's reload fuses them."""
    directories = [
        make_tiny_model(tmp_path / f"moe-{seed}", "qwen3_moe", seed=seed, tied=False, initializer_range=0.1)
        for seed in range(3)
    ]
    config = make_config(tmp_path, directories[0])
    prompt = fresh_prompt(12)
    with start_server(config, tmp_path / "server.log") as server, TrainerSide(server) as trainer:
        trainer.join()
        for step, directory in enumerate(directories):
            model = load_hf(directory)
            assert "model.layers.0.mlp.experts.0.gate_proj.weight" in trainer.snapshot(model, step).tensors()
            trainer.push(model, step)
            for answer in generate(server, prompt, n=4, max_tokens=40).completions:
                assert [(span.epoch, span.step) for span in answer.spans] == [(trainer.epoch, step)]
                difference = (torch.tensor(answer.logprobs) - hf_logprobs(model, prompt, answer.ids)).abs()
                assert difference.max() < TOLERANCE
