"""Our messages in the server's log: vLLM sets up its own loggers alone, and in each of its processes."""

from __future__ import annotations

import logging

from vllm.logger import init_logger


def adopt_vllm_logging() -> None:
    """Give this package's loggers the handlers and the level of vLLM's. Safe to call twice."""
    init_logger("vllm")  # makes sure that vLLM has set up its own
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("inflight_runtime")
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
