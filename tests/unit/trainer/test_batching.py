from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inflight_runtime.config.roles import LossConfig, TrainerConfig
from inflight_runtime.trainer.batching import BatchError, StepData, build_step, check_batch
from inflight_runtime.trainer.metrics import batch_metrics, rollout_lines
from inflight_runtime.types import Attempt, Group, Span, make_segment
from support.trainer_fakes import random_group, sampled_segment, step_batch, trainer_config


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return trainer_config(tmp_path, tmp_path, max_staleness=1)


def mixed_group() -> Group:
    """Step 5: a two-version answer, a multi-turn one with a history of its own, a failed one, a plain one."""
    two = make_segment(
        [10, 11, 12, 13], [True] * 4, [-1.0, -2.0, -3.0, -4.0], [Span(1, 1, 0, 3, "s", "b"), Span(1, 4, 3, 4, "s", "b")]
    )
    turns = make_segment(
        [20, 21, 22, 23],
        [True, False, False, True],
        [-1, 0, 0, -2],
        [Span(1, 3, 0, 1, "s", "b"), Span(1, 3, 3, 4, "s", "b")],
    )
    own = make_segment([1, 2, 30], [False, False, True], [0, 0, -1], [Span(1, 4, 2, 3, "s", "b")], shares_prompt=False)
    return Group(
        7,
        1,
        0,
        np.array([1, 2, 3], np.int32),
        (
            Attempt((two,), reward=1.0, parts={"exact": 1.0}),
            Attempt((turns, own), reward=0.0),
            Attempt(status="failed", error="boom"),
            Attempt((sampled_segment([40], version=(1, 4)),), reward=0.5, parts={"exact": 0.0}),
        ),
    )


def build(config: TrainerConfig, **changes: object) -> StepData:
    return build_step(step_batch(5, [mixed_group()], planned=2), config.model_copy(update=changes))


def test_each_segment_is_a_sequence_with_its_sampled_tokens(config: TrainerConfig) -> None:
    (sequences,) = build(config).sequences
    assert [s.ids.tolist() for s in sequences] == [
        [1, 2, 3, 10, 11, 12, 13],
        [1, 2, 3, 20, 21, 22, 23],
        [1, 2, 30],
        [1, 2, 3, 40],
    ]
    assert [s.ids[s.sampled].tolist() for s in sequences] == [[10, 11, 12, 13], [20, 23], [30], [40]]
    assert sequences[1].old_logprobs.tolist() == [-1.0, -2.0]


def test_advantages_leave_failed_attempts_out(config: TrainerConfig) -> None:
    (sequences,) = build(config).sequences
    assert [s.advantage for s in sequences] == pytest.approx([0.75, -0.75, -0.75, 0.0])


def test_weights_count_planned_attempts_and_an_attempts_segments_together(config: TrainerConfig) -> None:
    (sequences,) = build(config, loss=LossConfig(normalization="sequence_mean")).sequences
    assert [s.weight for s in sequences] == pytest.approx([1 / (8 * 4), 1 / (8 * 3), 1 / (8 * 3), 1 / 8])


def test_old_tokens_are_counted_and_kept_by_default(config: TrainerConfig) -> None:
    data = build(config)
    assert (data.over_age_tokens, data.tokens_sampled) == (3, 8)
    assert [record.staleness_max for record in data.records[0]] == [3, 1, 0]
    metrics = batch_metrics(data)
    assert metrics["staleness_mean"] == pytest.approx((3 * 3 + 0 + 1 + 1 + 0 + 0) / 8)
    assert metrics["staleness_max"] == 3


def test_mask_leaves_old_tokens_out_and_the_weights_as_they_are(config: TrainerConfig) -> None:
    kept, masked = (
        build(config, over_age=mode, loss=LossConfig(normalization="token_mean")) for mode in ("keep", "mask")
    )
    assert [s.ids[s.sampled].tolist() for s in masked.sequences[0]] == [[13], [20, 23], [30], [40]]
    assert [s.weight for s in masked.sequences[0]] == [s.weight for s in kept.sequences[0]]
    assert masked.over_age_tokens == 3
    assert masked.tokens_sampled == 8


def test_a_sequence_without_a_token_to_train_is_left_out(config: TrainerConfig) -> None:
    data = build(config, over_age="mask", max_staleness=0)
    assert [s.ids[s.sampled].tolist() for s in data.sequences[0]] == [[13], [30], [40]]


def test_drop_refuses_an_old_token_that_the_coordinator_let_through(config: TrainerConfig) -> None:
    with pytest.raises(BatchError, match="group 7 attempt 0: 3 tokens are older than max_staleness 1"):
        build(config, over_age="drop")


def test_a_version_of_a_rolled_back_timeline_counts_as_new(config: TrainerConfig) -> None:
    group = random_group(np.random.default_rng(0), 1, version=(1, 9))
    assert batch_metrics(build_step(step_batch(3, [group], planned=2), config))["staleness_max"] == 0


def test_metrics_of_a_batch(config: TrainerConfig) -> None:
    flat = replace(random_group(np.random.default_rng(0), 8), attempts=())
    flat = replace(
        flat, attempts=tuple(Attempt((sampled_segment([5], version=(1, 4)),), reward=0.25) for _ in range(4))
    )
    metrics = batch_metrics(build_step(step_batch(5, [mixed_group(), flat]), config))
    assert metrics["reward_mean"] == pytest.approx((1.0 + 0.0 + 0.5 + 4 * 0.25) / 7)
    assert metrics["reward/exact"] == pytest.approx(0.5)
    assert metrics["zero_variance_fraction"] == 0.5
    assert (metrics["attempts"], metrics["attempts_failed"], metrics["groups"]) == (7, 1, 2)


def test_rollout_lines_show_every_attempt_up_to_the_limit(config: TrainerConfig) -> None:
    lines = list(rollout_lines(build(config), 3))
    assert [(line["attempt"], line["status"]) for line in lines] == [(0, "ok"), (1, "ok"), (2, "failed")]
    assert lines[0]["versions"] == ["1.1", "1.4"]
    assert lines[2]["advantage"] is None
    assert lines[2]["error"] == "boom"


def good_groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return [random_group(rng, group_id) for group_id in (3, 5)]


def test_a_right_batch_passes(config: TrainerConfig) -> None:
    check_batch(step_batch(5, good_groups()), 5, config, 264)
    check_batch(step_batch(5, good_groups()[:1], planned=2), 5, config, 264)


@pytest.mark.parametrize(
    ("message", "asked", "change"),
    [
        ("asked for step 6", {"step": 6}, None),
        ("planned with 3 groups", {"planned": 3}, None),
        ("doubled, out of order", {}, lambda groups: groups[::-1]),
        ("doubled, out of order", {}, lambda groups: [groups[0], groups[0]]),
        ("outside the model's vocabulary", {"vocab": 200}, None),
        ("3 attempts", {}, lambda groups: [replace(groups[0], attempts=groups[0].attempts[:3]), groups[1]]),
        (
            "max_length is 256",
            {},
            lambda groups: [groups[0], replace(groups[1], prompt_ids=np.zeros(256, np.int32))],
        ),
    ],
)
def test_a_wrong_batch_is_refused(
    config: TrainerConfig, message: str, asked: dict[str, int], change: Callable[[list[Group]], list[Group]] | None
) -> None:
    groups = change(good_groups()) if change else good_groups()
    with pytest.raises(BatchError, match=message):
        check_batch(
            step_batch(5, groups, planned=asked.get("planned", 2)),
            asked.get("step", 5),
            config,
            asked.get("vocab", 264),
        )
