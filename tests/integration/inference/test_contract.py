"""The inference contract (DESIGN 5.3), the same tests against every engine."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib import request as urlrequest

import pytest
import torch

from inflight_runtime.protocol import GenerateReply, ServerStatus, WeightUpdateReply
from inflight_runtime.weights.digest import manifest_digest
from inflight_runtime.weights.errors import WeightTransferError
from support.servers import RunningServer, make_config, start_server
from support.tiny_models import MAX_LENGTH, VOCAB_SIZE, make_tokenizer
from support.trainer_side import TrainerSide, hf_logprobs, in_background

PROMPT = list(range(40, 60))
EOS = make_tokenizer().eos_token_id
TOLERANCE = 1e-5
DEADLINE_S = 60.0

ROUTES = [
    ("GET", "/runtime/v1/status"),
    ("POST", "/runtime/v1/generate"),
    ("POST", "/init_process_group"),
    ("POST", "/destroy_process_group"),
    ("POST", "/request_weight_update"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completion"),
]


def generate(server: RunningServer, **fields: Any) -> GenerateReply:
    """An answer that must come, checked against the rules that hold for all."""
    body = {"prompt_ids": PROMPT, "max_tokens": 16} | fields
    status, reply = server.call("POST", "/runtime/v1/generate", body, timeout_s=DEADLINE_S)
    assert status == 200, reply
    parsed = GenerateReply.model_validate(reply)
    assert len(parsed.completions) == body.get("n", 1)
    for answer in parsed.completions:
        assert 1 <= len(answer.ids) == len(answer.logprobs) <= body["max_tokens"]
        assert all(logprob <= 0 for logprob in answer.logprobs)
        assert answer.spans[0].start == 0
        assert answer.spans[-1].end == len(answer.ids)
        assert all(a.end == b.start and a.start < a.end for a, b in itertools.pairwise(answer.spans))
        assert answer.finish in ("stop", "length")
    return parsed


def refused(server: RunningServer, path: str, body: dict[str, Any], expected: int, *words: str) -> None:
    status, reply = server.call("POST", path, body, timeout_s=DEADLINE_S)
    assert status == expected, reply
    message = reply["error"] if isinstance(reply["error"], str) else reply["error"]["message"]
    for word in words:
        assert word in message


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def served(server: RunningServer) -> tuple[int, int]:
    version = server.status()["version"]
    return version["epoch"], version["step"]


def assert_serves(server: RunningServer, model: Any, version: tuple[int, int]) -> None:
    """Logprobs are this model's and labelled with this version."""
    for answer in generate(server, n=4, max_tokens=40, ignore_eos=True).completions:
        assert [(span.epoch, span.step) for span in answer.spans] == [version]
        found = torch.tensor(answer.logprobs)
        assert (found - hf_logprobs(model, PROMPT, answer.ids)).abs().max() < TOLERANCE


# --- what a server says of itself -------------------------------------------------------------------------------------


def test_a_fresh_server_has_no_version_and_samples_nothing(server: RunningServer, fresh: Any) -> None:
    status = ServerStatus.model_validate(fresh.status)
    assert status.version is None
    assert (status.engine, status.server_id) == (server.config.engine, server.config.server_id)
    assert (status.capacity, status.max_length, status.world_size) == (32, MAX_LENGTH, 1)
    assert (status.broken, status.updates, status.groups, status.digest) == ("", 0, [], "")
    code, body = fresh.generate
    assert code == 503
    assert "no weight version yet" in body["error"]


def test_status_after_an_update_names_version_digest_and_times(trainer: TrainerSide, qwen: Any) -> None:
    before = trainer.server.status()
    reply = WeightUpdateReply.model_validate(trainer.push(qwen.loaded[1], 3))
    status = ServerStatus.model_validate(trainer.server.status())
    assert status.version is not None
    assert (status.version.epoch, status.version.step) == (reply.epoch, reply.step) == (trainer.epoch, 3)
    assert status.boot_id == reply.boot_id == before["boot_id"]
    assert status.digest == reply.digest == trainer.snapshot(qwen.loaded[1], 3).digest
    assert status.updates == before["updates"] + 1
    assert status.groups == [trainer.tag]
    assert status.last_receive_ms == reply.receive_ms > 0
    assert status.last_commit_ms == reply.commit_ms > 0
    assert status.last_pause_ms == reply.pause_ms >= reply.commit_ms


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic a"}])
def test_every_route_asks_for_the_token(server: RunningServer, method: str, path: str, headers: dict[str, str]) -> None:
    status, _ = server.call(method, path, {} if method == "POST" else None, headers=headers)
    assert status == 401


def test_health_needs_no_token(server: RunningServer) -> None:
    assert server.call("GET", "/health", headers={})[0] == 200
    assert server.call("GET", "/healthz", headers={})[0] == 200


def test_a_server_is_ready_once_it_has_weights_to_serve(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[1], 0)
    assert trainer.server.call("GET", "/readyz", headers={})[0] == 200


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_scaled_distribution(trainer: TrainerSide, qwen: Any, temperature: float) -> None:
    trainer.push(qwen.loaded[1], 0)
    reply = generate(trainer.server, n=3, max_tokens=50, temperature=temperature)
    assert reply.server_id == trainer.server.config.server_id
    for answer in reply.completions:
        expected = hf_logprobs(qwen.loaded[1], PROMPT, answer.ids, temperature)
        assert (torch.tensor(answer.logprobs) - expected).abs().max() < TOLERANCE


def test_answers_of_one_request_differ(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    answers = generate(trainer.server, n=4, max_tokens=20, ignore_eos=True).completions
    assert len({tuple(answer.ids) for answer in answers}) == 4


def test_an_answer_ends_with_end_of_sequence_or_at_its_bound(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    answers = generate(trainer.server, n=16, max_tokens=200, seeds=list(range(16))).completions
    for answer in answers:
        assert EOS not in answer.ids[:-1]
        assert (answer.ids[-1] == EOS) == (answer.finish == "stop")
        assert answer.finish == "stop" or len(answer.ids) == 200
    assert {answer.finish for answer in answers} == {"stop", "length"}


def test_ignore_eos_goes_on_to_the_bound(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    answers = generate(trainer.server, n=8, max_tokens=200, ignore_eos=True).completions
    assert {(answer.finish, len(answer.ids)) for answer in answers} == {("length", 200)}
    assert any(EOS in answer.ids for answer in answers)


def test_stop_tokens_end_an_answer_and_stay_in_it(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    stops = list(range(0, VOCAB_SIZE, 2))
    for answer in generate(trainer.server, n=8, max_tokens=200, stop_token_ids=stops, ignore_eos=True).completions:
        assert answer.finish == "stop"
        assert [token % 2 for token in answer.ids] == [1] * (len(answer.ids) - 1) + [0]


def test_stop_texts_end_an_answer_and_their_tokens_stay_in_it(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = make_tokenizer()
    for answer in generate(trainer.server, n=8, max_tokens=400, stop=list(letters), ignore_eos=True).completions:
        texts = [tokenizer.decode([token]) for token in answer.ids]
        assert answer.finish == "stop"
        assert [text in letters and text != "" for text in texts] == [False] * (len(texts) - 1) + [True]


def test_max_tokens_is_clipped_to_the_models_length(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    prompt = [5] * (MAX_LENGTH - 7)
    answer = generate(trainer.server, prompt_ids=prompt, max_tokens=10_000, ignore_eos=True).completions[0]
    assert (len(answer.ids), answer.finish) == (7, "length")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt_ids": [1] * MAX_LENGTH, "max_tokens": 1}, [str(MAX_LENGTH)]),
        ({"prompt_ids": [], "max_tokens": 1}, ["prompt"]),
        ({"prompt_ids": [1, VOCAB_SIZE], "max_tokens": 1}, [str(VOCAB_SIZE)]),
        ({"prompt_ids": [1], "max_tokens": 0}, ["max_tokens"]),
        ({"prompt_ids": [1], "max_tokens": 1, "n": 0}, ["n"]),
        ({"prompt_ids": [1], "max_tokens": 1, "temperature": 0}, ["temperature"]),
        ({"prompt_ids": [1], "max_tokens": 1, "top_p": 0.9}, ["top_p"]),
        ({"prompt_ids": [1], "max_tokens": 1, "n": 2, "seeds": [1]}, ["seeds"]),
        ({"max_tokens": 1}, ["prompt_ids"]),
    ],
)
def test_a_bad_generate_request_is_refused_and_says_why(
    trainer: TrainerSide, qwen: Any, body: dict[str, Any], words: list[str]
) -> None:
    trainer.push(qwen.loaded[0], 0)
    refused(trainer.server, "/runtime/v1/generate", body, 400, *words)
    generate(trainer.server)


@pytest.mark.parametrize("path", ["/runtime/v1/generate", "/init_process_group", "/request_weight_update"])
def test_a_body_that_is_no_json_is_refused(server: RunningServer, path: str) -> None:
    call = urlrequest.Request(server.url + path, b"{not json", server.headers, method="POST")
    with pytest.raises(urlrequest.HTTPError) as error:
        urlrequest.urlopen(call, timeout=DEADLINE_S)
    assert error.value.code == 400
    assert json.loads(error.value.read())["error"]


def test_a_client_that_goes_away_frees_its_place(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    server = trainer.server
    wait_until(lambda: server.status()["running"] == 0)
    body = {"prompt_ids": PROMPT, "n": 8, "max_tokens": 900, "ignore_eos": True}
    with pytest.raises(TimeoutError):
        server.call("POST", "/runtime/v1/generate", body, timeout_s=0.15)
    wait_until(lambda: (server.status()["running"], server.status()["waiting"]) == (0, 0))
    generate(server)


def test_more_sequences_than_places_wait_and_are_all_answered(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    calls = [in_background(lambda: generate(trainer.server, n=20, max_tokens=10, ignore_eos=True)) for _ in range(4)]
    for call in calls:
        assert [len(answer.ids) for answer in call.result(DEADLINE_S).completions] == [10] * 20


# --- updates ----------------------------------------------------------------------------------------------------------


def test_after_each_update_the_server_has_the_trainers_weights(trainer: TrainerSide, qwen: Any) -> None:
    for step, model in enumerate(qwen.loaded):
        trainer.push(model, step)
        assert_serves(trainer.server, model, (trainer.epoch, step))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_same_with_a_tied_llama_and_grouped_heads(engine: str, llama: Any, tmp_path: Path) -> None:
    config = make_config(tmp_path, llama.directories[0], engine=engine)
    with start_server(config, tmp_path / "server.log", deadline_s=400) as server, TrainerSide(server) as trainer:
        trainer.join()
        for step, model in enumerate(llama.loaded):
            trainer.push(model, step)
            assert_serves(server, model, (trainer.epoch, step))


def test_generations_in_flight_go_on_across_updates_with_exact_labels(trainer: TrainerSide, qwen: Any) -> None:
    """The true switch token, found by logprobs under the old weights, is the one that the spans name."""
    server, length = trainer.server, 900
    trainer.push(qwen.loaded[0], 0)
    wait_until(lambda: server.status()["running"] == 0)
    calls = [
        in_background(lambda: generate(server, n=2, max_tokens=length, ignore_eos=True).completions) for _ in range(2)
    ]
    wait_until(lambda: server.status()["running"] == 4)
    for step in (1, 2, 3):
        trainer.push(qwen.loaded[step], step)
    for answer in [answer for call in calls for answer in call.result(DEADLINE_S)]:
        assert (len(answer.ids), answer.finish) == (length, "length")
        assert [(span.epoch, span.step) for span in answer.spans] == [(trainer.epoch, step) for step in range(4)]
        difference = (torch.tensor(answer.logprobs) - hf_logprobs(qwen.loaded[0], PROMPT, answer.ids)).abs()
        switch = answer.spans[0].end
        assert difference[:switch].max() < TOLERANCE
        assert difference[switch] > 100 * TOLERANCE
    assert_serves(server, qwen.loaded[3], (trainer.epoch, 3))


def test_a_repeated_update_is_answered_at_once_and_changes_nothing(trainer: TrainerSide, qwen: Any) -> None:
    reply = trainer.push(qwen.loaded[1], 5)
    updates = trainer.server.status()["updates"]
    status, again = trainer.request(trainer.update_body(trainer.snapshot(qwen.loaded[1], 5)))
    assert (status, again) == (200, reply)
    assert trainer.server.status()["updates"] == updates


def test_one_version_has_one_content(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[1], 5)
    body = trainer.update_body(trainer.snapshot(qwen.loaded[2], 5))
    refused(trainer.server, "/request_weight_update", body, 409, "one content")
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 5))


def test_an_older_step_is_refused(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[1], 5)
    body = trainer.update_body(trainer.snapshot(qwen.loaded[2], 4))
    refused(trainer.server, "/request_weight_update", body, 409, "older")
    assert served(trainer.server) == (trainer.epoch, 5)


def test_an_older_trainer_is_refused_once_a_newer_has_joined(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[1], 5)
    body = trainer.update_body(trainer.snapshot(qwen.loaded[2], 6))
    with TrainerSide(trainer.server) as newer:
        newer.join()
        assert newer.epoch > trainer.epoch
        assert trainer.server.status()["groups"] == [newer.tag]
        refused(trainer.server, "/request_weight_update", body, 409, f"epoch {trainer.epoch} is over")
        refused(trainer.server, "/init_process_group", trainer.init_body("late"), 409, "is over")
        assert served(trainer.server) == (trainer.epoch, 5)
        # A rollback: fewer steps under a newer epoch is a newer version.
        newer.push(qwen.loaded[3], 2)
        assert_serves(trainer.server, qwen.loaded[3], (newer.epoch, 2))


def _renamed(specs: list[dict[str, Any]]) -> None:
    specs[3]["name"] = "model.layers.0.no_such.weight"


def _surplus(specs: list[dict[str, Any]]) -> None:
    specs.append(specs[3] | {"name": "model.layers.9.mlp.up_proj.weight"})


def _missing(specs: list[dict[str, Any]]) -> None:
    specs.pop(3)


def _misshapen(specs: list[dict[str, Any]]) -> None:
    specs[3]["shape"] = [1, *specs[3]["shape"]]


def _twice(specs: list[dict[str, Any]]) -> None:
    specs.append(specs[3])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_renamed, "no_such"),
        (_surplus, "layers.9"),
        (_missing, "missing"),
        (_misshapen, "shape"),
        (_twice, "twice"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused_before_anything_is_touched(
    trainer: TrainerSide, qwen: Any, change: Callable[[list[dict[str, Any]]], None], word: str
) -> None:
    trainer.push(qwen.loaded[0], 0)
    body = trainer.update_body(trainer.snapshot(qwen.loaded[1], 1))
    change(body["tensors"])
    refused(trainer.server, "/request_weight_update", body, 400, word)
    assert_serves(trainer.server, qwen.loaded[0], (trainer.epoch, 0))
    trainer.push(qwen.loaded[1], 1)  # nothing was sent, so the pair is as good as before
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 1))


def test_bytes_that_are_not_those_announced_are_never_served(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    wrong = trainer.snapshot(qwen.loaded[1], 1)
    specs = [spec.model_copy() for spec in wrong.specs]
    specs[-1].digest = "0" * 16
    body = trainer.update_body(wrong, tensors=[spec.model_dump() for spec in specs], digest=manifest_digest(specs))
    answer = in_background(lambda: trainer.request(body))
    trainer.send(wrong)
    status, reply = answer.result(DEADLINE_S)
    assert status == 502
    assert specs[-1].name in reply["error"]
    assert_serves(trainer.server, qwen.loaded[0], (trainer.epoch, 0))
    trainer.join().push(qwen.loaded[1], 1)
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 1))


def test_a_manifest_that_is_not_its_digest_is_refused(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    body = trainer.update_body(trainer.snapshot(qwen.loaded[1], 1), digest="0" * 64)
    status, reply = trainer.request(body)
    assert status in (400, 502)
    assert "digest" in reply["error"]
    assert_serves(trainer.server, qwen.loaded[0], (trainer.epoch, 0))


def test_a_trainer_that_dies_half_way_leaves_the_old_weights_serving(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    snapshot = trainer.snapshot(qwen.loaded[1], 1)
    answer = in_background(lambda: trainer.request(trainer.update_body(snapshot)))
    trainer.send(snapshot, stop=2)
    trainer.leave()
    status, reply = answer.result(DEADLINE_S)
    assert status == 502
    assert "old weights" in reply["error"]
    assert trainer.tag not in trainer.server.status()["groups"]
    assert_serves(trainer.server, qwen.loaded[0], (trainer.epoch, 0))
    trainer.join().push(qwen.loaded[1], 1)
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 1))


def test_a_trainer_that_stalls_is_given_up_at_the_deadline(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    snapshot = trainer.snapshot(qwen.loaded[1], 1)
    answer = in_background(lambda: trainer.request(trainer.update_body(snapshot, timeout_seconds=1.0)))
    trainer.send(snapshot, stop=1)
    status, reply = answer.result(DEADLINE_S)
    assert status in (502, 504)
    assert "old weights" in reply["error"]
    assert_serves(trainer.server, qwen.loaded[0], (trainer.epoch, 0))
    trainer.join().push(qwen.loaded[1], 1)
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 1))


def test_a_new_trainer_takes_over_in_the_middle_of_a_transfer(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    snapshot = trainer.snapshot(qwen.loaded[1], 1)
    answer = in_background(lambda: trainer.request(trainer.update_body(snapshot)))
    trainer.send(snapshot, stop=1)
    with TrainerSide(trainer.server) as newer:
        newer.join()
        assert answer.result(DEADLINE_S)[0] in (409, 502)
        assert served(trainer.server) == (trainer.epoch, 0)
        newer.push(qwen.loaded[2], 0)
        with contextlib.suppress(WeightTransferError):
            trainer.send(snapshot, first=1)  # the old one has not noticed yet
        assert_serves(trainer.server, qwen.loaded[2], (newer.epoch, 0))


def test_a_destroyed_group_must_be_joined_again(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    for _ in range(2):
        assert trainer.server.call("POST", "/destroy_process_group", {"tag": trainer.tag})[0] == 204
    assert trainer.server.status()["groups"] == []
    body = trainer.update_body(trainer.snapshot(qwen.loaded[1], 1))
    refused(trainer.server, "/request_weight_update", body, 409, "init_process_group")
    trainer.join().push(qwen.loaded[1], 1)
    assert_serves(trainer.server, qwen.loaded[1], (trainer.epoch, 1))


def test_a_group_that_nobody_meets_is_given_up(server: RunningServer) -> None:
    with TrainerSide(server) as side:
        refused(server, "/init_process_group", side.init_body("alone", timeout_seconds=1.0), 504, "alone")
        assert "alone" not in server.status()["groups"]
        side.join()


def test_a_group_of_the_wrong_size_is_refused(server: RunningServer) -> None:
    with TrainerSide(server) as side:
        refused(server, "/init_process_group", side.init_body("crowd", world_size=3), 400, "world_size")


# --- OpenAI's format --------------------------------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def openai_call(server: RunningServer, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = server.headers | {"Content-Type": "application/json"}
    with urlrequest.urlopen(urlrequest.Request(server.url + path, data, headers), timeout=DEADLINE_S) as reply:
        assert reply.status == 200
        return reply.read().decode()


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


CHAT = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 12, "n": 2, "seed": 3}


def test_models_names_the_served_model(server: RunningServer) -> None:
    body = strict_json(openai_call(server, "/v1/models"))
    assert body["object"] == "list"
    assert [(entry["id"], entry["object"]) for entry in body["data"]] == [("policy", "model")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completion"])
def test_chat_answers_in_openais_format(trainer: TrainerSide, qwen: Any, path: str) -> None:
    trainer.push(qwen.loaded[0], 0)
    body = strict_json(openai_call(trainer.server, path, CHAT | {"model": "policy", "logprobs": True}))
    assert (body["object"], body["model"]) == ("chat.completion", "policy")
    prompt = make_tokenizer().apply_chat_template(CHAT["messages"], add_generation_prompt=True, return_dict=False)
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert isinstance(choice["message"]["content"], str)
        assert choice["finish_reason"] in ("stop", "length")
        content = choice["logprobs"]["content"]
        assert 1 <= len(content) <= 12
        assert all(entry["logprob"] <= 0 and isinstance(entry["token"], str) for entry in content)


@pytest.mark.parametrize("prompt", ["hello", PROMPT])
def test_completions_take_text_and_ids(trainer: TrainerSide, qwen: Any, prompt: str | list[int]) -> None:
    trainer.push(qwen.loaded[0], 0)
    body = strict_json(
        openai_call(
            trainer.server,
            "/v1/completions",
            {"model": "policy", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 0},
        )
    )
    assert body["object"] == "text_completion"
    choice = body["choices"][0]
    assert isinstance(choice["text"], str)
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) <= 8
    assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])


def test_a_stream_adds_up_to_the_whole_answer(trainer: TrainerSide, qwen: Any) -> None:
    trainer.push(qwen.loaded[0], 0)
    ask = CHAT | {"model": "policy", "temperature": 0, "n": 1}
    whole = strict_json(openai_call(trainer.server, "/v1/chat/completions", ask))["choices"][0]
    text = openai_call(trainer.server, "/v1/chat/completions", ask | {"stream": True})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [strict_json(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["finish_reason"]]


def test_a_model_that_is_not_served_is_refused(server: RunningServer) -> None:
    refused(server, "/v1/chat/completions", CHAT | {"model": "another"}, 404, "another")
