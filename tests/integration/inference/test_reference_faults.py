"""The fault switches of the reference server do what the tests of other parts rely on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from inflight_runtime.inference.reference.decoder import load_model
from inflight_runtime.inference.reference.faults import DIED_ON_PURPOSE
from inflight_runtime.inference.reference.sampling import generate_one
from inflight_runtime.inference.reference.server import run_server
from inflight_runtime.weights.errors import WeightTransferError
from support.servers import RunningServer, make_config, start_server
from support.trainer_side import TrainerSide, hf_logprobs, in_background

PROMPT = [10, 20, 30]
DEADLINE_S = 60.0

Start = Callable[..., contextlib.AbstractContextManager[tuple[RunningServer, TrainerSide]]]


@pytest.fixture
def start(qwen: Any, tmp_path: Path) -> Start:
    """Start a reference server with some faults, joined by a trainer and serving ``(epoch, 0)``."""

    @contextlib.contextmanager
    def run(faults: dict[str, Any], **changes: Any) -> Iterator[tuple[RunningServer, TrainerSide]]:
        config = make_config(tmp_path, qwen.directories[0], engine="reference", faults=faults, **changes)
        with start_server(config, tmp_path / "server.log") as server, TrainerSide(server) as trainer:
            yield server, trainer.join()

    return run


def generate(server: RunningServer, timeout_s: float = DEADLINE_S, **fields: Any) -> tuple[int, Any]:
    body = {"prompt_ids": PROMPT, "max_tokens": 8, "ignore_eos": True} | fields
    return server.call("POST", "/runtime/v1/generate", body, timeout_s=timeout_s)


def push(trainer: TrainerSide, model: Any, step: int) -> tuple[int, Any]:
    """An update that need not succeed."""
    snapshot = trainer.snapshot(model, step)
    answer = in_background(lambda: trainer.request(trainer.update_body(snapshot)))
    with contextlib.suppress(WeightTransferError):
        trainer.send(snapshot)
    return answer.result(DEADLINE_S)


def test_the_answer_to_weights_prompt_and_seed_is_the_plain_loops_bit_for_bit(start: Start, qwen: Any) -> None:
    with start({}) as (server, trainer):
        trainer.push(qwen.loaded[1], 0)
        noise = [in_background(lambda: generate(server, n=5, max_tokens=120)) for _ in range(3)]
        status, reply = generate(server, n=4, max_tokens=60, seeds=[11, 22, 33, 44], temperature=0.9)
        assert status == 200
        model = load_model(qwen.directories[1])
        for seed, answer in zip([11, 22, 33, 44], reply["completions"], strict=True):
            assert (answer["ids"], answer["logprobs"]) == generate_one(model, PROMPT, 60, 0.9, seed, ())
        assert [call.result(DEADLINE_S)[0] for call in noise] == [200] * 3


def test_recomputing_takes_the_new_weights_for_the_whole_sequence(start: Start, qwen: Any) -> None:
    with start({"slow_token_s": 0.005}, kv_cache="recompute") as (server, trainer):
        trainer.push(qwen.loaded[0], 0)
        call = in_background(lambda: generate(server, max_tokens=300))
        wait_until(lambda: server.status()["running"] == 1)
        trainer.push(qwen.loaded[1], 1)
        answer = call.result(DEADLINE_S)[1]["completions"][0]
        assert [span["step"] for span in answer["spans"]] == [0, 1]
        switch = answer["spans"][0]["end"]
        for model, part in ((qwen.loaded[0], slice(0, switch)), (qwen.loaded[1], slice(switch, None))):
            expected = hf_logprobs(model, PROMPT, answer["ids"])[part]
            assert max(abs(expected - expected.new_tensor(answer["logprobs"][part]))) < 1e-5


def test_a_server_that_dies_in_a_transfer_is_gone_and_its_trainer_notices(start: Start, qwen: Any) -> None:
    with start({"die_in_transfer": True}) as (server, trainer):
        snapshot = trainer.snapshot(qwen.loaded[1], 0)
        answer = in_background(lambda: trainer.request(trainer.update_body(snapshot)))
        with pytest.raises(WeightTransferError):
            trainer.send(snapshot)
        assert server.process.wait(DEADLINE_S) == DIED_ON_PURPOSE
        assert isinstance(answer.exception(DEADLINE_S), (URLError, ConnectionError, RemoteDisconnected))


def test_corrupted_bytes_are_found_and_the_old_weights_serve_on(start: Start, qwen: Any) -> None:
    with start({"corrupt_receive": True}) as (server, trainer):
        status, reply = push(trainer, qwen.loaded[1], 0)
        assert status == 502
        assert "did not arrive as sent" in reply["error"]
        assert server.status()["version"] is None
        assert server.status()["broken"] == ""


def test_a_commit_that_fails_half_way_breaks_the_server_for_good(start: Start, qwen: Any) -> None:
    with start({"refuse_commit": True}) as (server, trainer):
        status, reply = push(trainer, qwen.loaded[1], 0)
        assert status == 503
        assert "stops after" in reply["error"]
        assert "half-way" in server.status()["broken"]
        assert generate(server)[0] == 503
        assert server.call("POST", "/v1/completions", {"prompt": "a"})[0] == 503
        assert server.call("GET", "/health")[0] == 503
        assert trainer.request(trainer.update_body(trainer.snapshot(qwen.loaded[1], 1)))[0] == 503


def test_generation_goes_on_under_the_old_version_while_an_update_is_slow(start: Start, qwen: Any) -> None:
    with start({"delay_update_s": 2.0}) as (server, trainer):
        trainer.push(qwen.loaded[0], 0)
        update = in_background(lambda: trainer.push(qwen.loaded[1], 1))
        wait_until(lambda: not update.done())
        seen: list[int] = []
        while not update.done():
            seen.append(generate(server)[1]["completions"][0]["spans"][0]["step"])
        assert update.result()["step"] == 1
        assert seen[0] == 0
        assert generate(server)[1]["completions"][0]["spans"][0]["step"] == 1


def test_each_nth_request_is_dropped_or_never_answered(start: Start, qwen: Any) -> None:
    with start({"drop_generate_every": 2, "hang_generate_every": 3, "die_after_requests": 5}) as (server, trainer):
        trainer.push(qwen.loaded[0], 0)
        assert generate(server)[0] == 200
        with pytest.raises((URLError, ConnectionError)):
            generate(server)
        with pytest.raises(TimeoutError):
            generate(server, timeout_s=0.5)
        with pytest.raises((URLError, ConnectionError)):
            generate(server)
        with pytest.raises((URLError, ConnectionError)):
            generate(server)
        assert server.process.wait(DEADLINE_S) == DIED_ON_PURPOSE


def test_a_signal_ends_the_server_in_the_middle_of_its_work(start: Start, qwen: Any) -> None:
    with start({"slow_token_s": 0.01, "hang_generate_every": 2}) as (server, trainer):
        trainer.push(qwen.loaded[0], 0)
        calls = [in_background(lambda: generate(server, max_tokens=400)) for _ in range(2)]
        wait_until(lambda: server.status()["running"] == 1)
        server.process.terminate()
        assert server.process.wait(DEADLINE_S) == 0
        for call in calls:
            error = call.exception(DEADLINE_S)
            assert error is not None or call.result()[0] == 503


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": {"no_such_switch": 1}}, "no_such_switch"),
        ({"max_length": 100_000}, "positions"),
        ({"path": "/nowhere"}, "/nowhere"),
        ({"port": "taken"}, "address already in use"),
    ],
)
def test_a_server_that_cannot_start_says_why_without_a_traceback(
    qwen: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    config = make_config(tmp_path, qwen.directories[0], engine="reference", faults=changes.get("faults", {}))
    model = {name: changes[name] for name in ("max_length", "path") if name in changes}
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    with taken(config.port) if "port" in changes else contextlib.nullcontext():
        assert run_server(config) == 2
    message = capsys.readouterr().err
    assert "i0 not started" in message
    assert words in message
    assert "Traceback" not in message


@contextlib.contextmanager
def taken(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
