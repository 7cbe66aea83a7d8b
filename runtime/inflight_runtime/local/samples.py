"""Rollouts as a person wants to read them: each prompt once, its answers by reward, and who wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from inflight_runtime.local.text import plain_text

Choice = Literal["newest", "best", "worst"]

ANSWER_LENGTH: Final = 600
PROMPT_LENGTH: Final = 1200


def choose(
    records: Iterable[dict[str, Any]], *, step: int | None, choice: Choice, count: int
) -> list[list[dict[str, Any]]]:
    """Pick groups of attempts at one prompt.

    Args:
        records: attempts, as ``rollouts.jsonl`` has them.
        step: only those of this step; ``None``: of all.
        choice: the newest groups, those with the best single answer or those with the worst.
        count: how many groups.

    Returns:
        Groups in reading order, each with its best answer first.
    """
    # A step that was trained again after a crash is there twice: the later line is the surviving history.
    latest: dict[tuple[int, int, int], dict[str, Any]] = {}
    for record in records:
        key = (int(record["step"]), int(record["group"]), int(record["attempt"]))
        latest.pop(key, None)
        latest[key] = record
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for (at, group_id, _), record in latest.items():
        if step is None or at == step:
            groups.setdefault((at, group_id), []).append(record)
    for group in groups.values():
        group.sort(key=lambda record: (record.get("status") == "ok", float(record["reward"])), reverse=True)
    if choice == "newest":
        return [groups[key] for key in sorted(groups, key=lambda key: (key[0], -key[1]))[-count:]][::-1]
    keys = sorted(groups, reverse=True)  # among equals the newest first
    if choice == "best":
        keys.sort(key=lambda key: -float(groups[key][0]["reward"]))
    else:
        keys.sort(key=lambda key: min(float(record["reward"]) for record in groups[key]))
    return [groups[key] for key in keys[:count]]


def render_groups(groups: Sequence[Sequence[dict[str, Any]]]) -> RenderableType:
    """Lay the groups out for reading."""
    blocks: list[RenderableType] = []
    for group in groups:
        first = group[0]
        rewards = [float(record["reward"]) for record in group if record.get("status") == "ok"]
        heading = Text(f"step {first['step']}, group {first['group']}, problem {first.get('problem')}", style="bold")
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        heading.append(f"   {len(group)} answers{mean}", style="dim")
        prompt = _shorten(str(first.get("prompt", "")), PROMPT_LENGTH)
        answers = Table.grid(padding=(0, 2))
        answers.add_column(justify="right", no_wrap=True)
        answers.add_column(overflow="fold")
        for record in group:
            answers.add_row(*_answer(record))
        blocks += [heading, Padding(Text(prompt or "(empty prompt)", style="cyan"), (0, 0, 0, 2))]
        blocks += [Padding(answers, (0, 0, 0, 2)), Text()]
    return Group(*blocks)


def _answer(record: dict[str, Any]) -> tuple[Text, Text]:
    if record.get("status") != "ok":
        return Text("failed", style="red"), Text(plain_text(str(record.get("error") or "no reason was given")))
    reward = float(record["reward"])
    answer = Text(_shorten(str(record.get("text", "")), ANSWER_LENGTH) or "(empty)")
    parts = record.get("parts") or {}
    notes = [f"{plain_text(str(name))} {float(value):g}" for name, value in parts.items()]
    versions = [str(version) for version in record.get("versions") or ()]
    if versions:
        notes.append(f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}..{versions[-1]}")
    if record.get("finish") == "length":
        notes.append("cut at maxTokens")
    if notes:
        answer.append(f"   [{', '.join(notes)}]", style="dim")
    return Text(f"{reward:.3f}", style="green" if reward > 0 else "yellow"), answer


def _shorten(text: str, limit: int) -> str:
    clean = plain_text(text).strip()
    return clean if len(clean) <= limit else f"{clean[:limit]}... ({len(clean)} characters)"
