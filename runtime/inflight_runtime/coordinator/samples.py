"""Rollouts as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inflight_runtime.coordinator.payloads import PayloadStore
from inflight_runtime.coordinator.steps import ShownGroup
from inflight_runtime.types import Attempt, decode_group


def readable(groups: Iterable[ShownGroup], payloads: PayloadStore, limit: int) -> list[dict[str, Any]]:
    """Read groups and lay their attempts out, at most ``limit`` of them.

    Raises:
        PayloadError: a payload is missing or damaged.
    """
    found: list[dict[str, Any]] = []
    for shown in groups:
        if len(found) >= limit:
            break
        group = decode_group(payloads.read(shown.ref))
        for number, attempt in enumerate(group.attempts):
            found.append(
                {
                    "group_id": group.group_id,
                    "problem_index": group.problem_index,
                    "attempt": number,
                    "step": shown.step,
                    "state": shown.state,
                    "prompt_text": group.prompt_text,
                    **_attempt(attempt),
                }
            )
    return found[:limit]


def _attempt(attempt: Attempt) -> dict[str, Any]:
    spans = list(attempt.spans())
    return {
        "reward": attempt.reward,
        "parts": attempt.parts,
        "status": attempt.status,
        "finish": attempt.finish,
        "text": attempt.text,
        "error": attempt.error,
        "tokens": attempt.sampled_tokens,
        "versions": list(dict.fromkeys(str(span.version) for span in spans)),
        "servers": list(dict.fromkeys(span.server for span in spans)),
    }
