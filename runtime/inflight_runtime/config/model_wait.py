"""Waits for a model that somebody else still writes to the claim that a role reads it from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inflight_runtime.config.model_files import missing_from_model, missing_from_tokenizer
from inflight_runtime.config.roles import ModelFiles

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
TELL_EVERY_S: Final = 30.0


def wait_for_model(
    model: ModelFiles,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when the model and its tokenizer are whole, or at once when ``model.wait_s`` is 0.

    Args:
        model: what to wait for, and for how long.
        sleep: waits.
        clock: a clock that is never set back, in seconds.

    Raises:
        ValueError: they are not, after ``model.wait_s`` seconds; the message names what is missing.
    """
    if model.wait_s <= 0:
        return
    began = told = clock()
    first = True
    while missing := _missing(model):
        now = clock()
        if now - began >= model.wait_s:
            raise ValueError(
                f"the model at {model.path} is not whole after {model.wait_s:g} s: {missing} missing. Put it on the "
                "claim that spec.model.volume names (and look at its subPath), then start the job again"
            )
        if first or now - told >= TELL_EVERY_S:
            first, told = False, now
            logger.warning("waiting for the model at %s: %s missing", model.path, missing)
        sleep(POLL_S)
    if not first:
        logger.info("the model is there, after %.0f s", clock() - began)


def _missing(model: ModelFiles) -> str:
    return ", ".join(missing_from_model(Path(model.path)) + missing_from_tokenizer(Path(model.tokenizer)))
