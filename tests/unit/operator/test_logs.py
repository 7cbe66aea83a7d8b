"""Log lines."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from inflight_operator.logs import configure, job_context, mask

TOKEN = "q7Zb0X1-_tqV2mJwE9sKcA4RgYh8uLdN"
logger = logging.getLogger("inflight_operator.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_whatever_is_in_it(stream: io.StringIO) -> None:
    configure("info", json=True, stream=stream)
    logger.info("two\nlines, %s", 'a "quote" \ud800')
    logger.debug("not shown")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    logger.info("wrong %d", "argument")
    first, second, third = lines(stream)
    assert set(first) == {"time", "level", "logger", "message"}
    assert first["message"] == 'two\nlines, a "quote" \ud800'
    assert (first["level"], first["logger"]) == ("INFO", "inflight_operator.test")
    assert len(first["time"]) == len("2026-11-30T03:00:00.000Z")
    assert second["level"] == "ERROR"
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ValueError: why")
    assert third["message"] == "wrong %d ('argument',)"


def test_text_is_for_people_and_no_message_passes_for_another_line(stream: io.StringIO) -> None:
    configure("DEBUG", stream=stream)
    with job_context("team/letters"):
        logger.warning("the run says: %s", "done\n2026-11-30T03:00:00.000Z INFO    inflight_operator: all is well")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING inflight_operator.test [team/letters]: the run says: done")
    assert second.startswith("    2026")


async def test_every_line_of_a_reconcile_names_its_job(stream: io.StringIO) -> None:
    configure(json=True, stream=stream)

    async def reconcile(key: str) -> None:
        with job_context(key):
            await asyncio.sleep(0)
            logger.info("begins")
            await asyncio.create_task(child())
        logger.info("after")

    async def child() -> None:
        logging.getLogger("some.library").info("in a task")

    async with asyncio.timeout(20.0):
        await asyncio.gather(reconcile("team/a"), reconcile("team/b"))
    found = [(line["message"], line.get("job")) for line in lines(stream)]
    for key in ("team/a", "team/b"):
        assert ("begins", key) in found
        assert ("in a task", key) in found
    assert found.count(("after", None)) == 2


def test_lines_of_kopf_and_warnings_go_the_same_way(stream: io.StringIO) -> None:
    configure(json=True, stream=stream)
    kopf = logging.getLogger("kopf.objects")
    kopf.info("handled", extra={"k8s_ref": {"kind": "Pod", "namespace": "team", "name": "letters-0"}})
    kopf.warning("seen", extra={"k8s_ref": {"kind": "RLTrainingJob", "namespace": "team", "name": "letters"}})
    kopf.warning("seen", extra={"k8s_ref": {"kind": "Pod", "namespace": "team", "name": "letters-0", "uid": None}})
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    job, pod, warning = lines(stream)
    assert (job["job"], "object" in job) == ("team/letters", False)
    assert (pod["object"], "job" in pod) == ("Pod team/letters-0", False)
    assert warning["logger"] == "py.warnings"


def test_kopfs_own_set_up_is_replaced_not_doubled(stream: io.StringIO) -> None:
    logging.getLogger().addHandler(logging.StreamHandler(io.StringIO()))
    configure(stream=stream)
    configure(stream=stream)
    logger.info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_the_kubernetes_client_never_prints_answers(stream: io.StringIO) -> None:
    configure("DEBUG", stream=stream)
    logging.getLogger("kubernetes.aio.client.rest").debug("response body: a Secret")
    assert stream.getvalue() == ""


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is none of DEBUG"):
        configure("loud")


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {TOKEN}",
        f"{{'Authorization': 'Bearer {TOKEN}'}}",
        f"authorization: bearer {TOKEN}",
        "Bearer short",
        f'{{"data": {{"token": "{base64.b64encode(TOKEN.encode()).decode()}"}}}}',
        f"{{'token': b'{TOKEN}'}}",
        f'{{\\"hub_token\\": \\"{TOKEN}\\"}}',
        f"HF_TOKEN={TOKEN} python",
        f"token={TOKEN}",
        f"token: {TOKEN}",
        f"'access-token':'{TOKEN}",
        "'token': 'tiny'",
        '{"name": "HF_TOKEN", "value": "hf_abcdefghijklmnopqrstuvwx"}',
        "eyJhbGciOiJSUzI1NiIsImtpZCI6.eyJpc3MiOiJrdWJlcm5ldGVz.c2lnbmF0dXJl",
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_tokens_are_masked_in_messages_arguments_and_tracebacks(text: str, as_json: bool, stream: io.StringIO) -> None:
    configure(json=as_json, stream=stream)
    logger.info("sent %s", text)
    logger.info(text.replace("%", "%%"))
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("failed", stack_info=True)
    shown = stream.getvalue()
    for secret in (TOKEN, base64.b64encode(TOKEN.encode()).decode(), "short", "tiny", "hf_abc", "c2lnbmF0dXJl"):
        if secret in text:
            assert secret not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "text",
    [
        "the bearer token is missing or wrong: send the token of this job's token file",
        'NotFound: secrets "letters-token" not found',
        "tokens: 12345678901234567890",
        "tokenSecretRef: {name: a-secret-with-a-long-name}",
        "1234 tokens/s, token: 7",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask(text) == text


def test_masking_takes_no_time_on_long_text() -> None:
    for piece in ("token", "Bearer ", "eyJ-", 'token="', "token\\\\\\", "bearer\t"):
        mask(piece * 50_000)
