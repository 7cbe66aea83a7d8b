"""What a coordinator's ``/v1/state`` says, as far as the status of a job shows it.

Pods run code of the job's owner, and a runtime of another version has other fields: a field that is not what it should
be is left out, and nothing gets into the status that the API server or a reader of it could not take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from inflight_operator.lifecycle import format_time
from inflight_runtime.api.status import PolicyVersion, Progress

LARGEST_COUNT: Final = 2**53 - 1
"""Above it a JSON number is no longer exact everywhere, and above 2**63 the API server refuses the whole status."""
SIGNIFICANT_DIGITS: Final = 6
LONGEST_OUTCOME: Final = 64
LONGEST_REASON: Final = 4_000


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a run.

    Attributes:
        progress: the newest numbers, ``None`` when there never were any. Its ``updated_time`` is when they were first
            read as they are.
        outcome: what the coordinator last said of the run: ``running``, ``succeeded``, ``failed``, or a newer word.
        reason: why it ended like that.
        error: why the coordinator cannot be read now; empty when it can. The words stay the same while the cause does.
    """

    progress: Progress | None
    outcome: str = ""
    reason: str = ""
    error: str = ""


class UnreadableError(Exception):
    """There is no usable answer; the message is for :attr:`Reading.error`."""


def understand(body: bytes) -> Reading:
    """Read an answer field by field, as other versions of the runtime have other fields.

    Raises:
        UnreadableError: it is no state of a run.
    """
    try:
        state = json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError):  # also numbers with more digits than Python converts
        raise UnreadableError("the answer is not JSON") from None
    if not isinstance(state, dict):
        raise UnreadableError("the answer is not a JSON object")
    step = _count(state.get("step"))
    if step is None:  # 0 would say that the run has not begun
        raise UnreadableError("the answer does not say which step the run is at: another version of the runtime?")
    groups, metrics, version = (_object(state.get(name)) for name in ("groups", "metrics", "policy_version"))
    epoch, version_step = _count(version.get("epoch")), _count(version.get("step"))
    speed = _number(metrics.get("tokens_per_second"))
    progress = Progress(
        step=step,
        steps=_count(state.get("steps")) or 0,
        policy_version=None if epoch is None or version_step is None else PolicyVersion(epoch=epoch, step=version_step),
        reward_mean=_number(metrics.get("reward_mean")),
        staleness_mean=_number(metrics.get("staleness_mean")),
        tokens_per_second=speed if speed is None or speed >= 0 else None,
        groups_trained=_count(groups.get("trained")),
        groups_dropped=_count(groups.get("dropped")),
        checkpoint_step=_count(state.get("checkpoint_step")),
        updated_time=format_time(datetime.now(UTC)),
    )
    return Reading(progress, _text(state.get("outcome"), LONGEST_OUTCOME), _text(state.get("reason"), LONGEST_REASON))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else None


def _number(value: Any) -> float | None:
    """A finite number as people read it; more digits would only make the status long."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(f"{float(value):.{SIGNIFICANT_DIGITS}g}")
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _text(value: Any, longest: int) -> str:
    """Text that every reader of the status can take: no lone surrogates, no control characters, a bounded length."""
    if not isinstance(value, str):
        return ""
    clean = "".join(char if char.isprintable() or char == "\n" else " " for char in value[: longest + 1]).strip()
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
