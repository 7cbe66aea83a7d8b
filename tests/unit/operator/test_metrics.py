"""The operator's own metrics."""

from __future__ import annotations

from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inflight_operator.builders import BUILDER_REVISION
from inflight_operator.kube import KubeError
from inflight_operator.metrics import MOST_REASONS, OperatorMetrics
from inflight_operator.workqueue import Attempt, WorkQueue
from inflight_runtime.api.enums import Phase


def attempt(error: BaseException | None = None, seconds: float = 0.2) -> Attempt:
    return Attempt("team/letters", seconds, error, 0 if error is None else 1, None)


def samples(metrics: OperatorMetrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its labels' values (in the order of the labels' names), as a scrape has them."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
        if sample.name == name
    }


def test_attempts_are_counted_by_result_and_errors_by_their_word() -> None:
    metrics = OperatorMetrics()
    assert samples(metrics, "inflight_reconciles_total") == {("success",): 0, ("error",): 0}
    for error in (None, None, KubeError(403, "Forbidden", "no"), TimeoutError(), ValueError("x"), ValueError("y")):
        metrics.attempt(attempt(error))
    assert samples(metrics, "inflight_reconciles_total") == {("success",): 2, ("error",): 4}
    assert samples(metrics, "inflight_reconcile_errors_total") == {
        ("Forbidden",): 1,
        ("TimeoutError",): 1,
        ("ValueError",): 2,
    }
    assert samples(metrics, "inflight_reconcile_seconds_count") == {(): 6}
    assert samples(metrics, "inflight_reconcile_seconds_sum") == {(): pytest.approx(1.2)}


def test_whatever_a_server_says_the_number_of_series_is_bounded() -> None:
    metrics = OperatorMetrics()
    for number in range(500):
        metrics.attempt(attempt(KubeError(502, f"Reason{number}", "")))
    for reason in ("", "<html>", "x" * 1000, "two words", "é"):
        metrics.attempt(attempt(KubeError(502, reason, "")))
    found = samples(metrics, "inflight_reconcile_errors_total")
    assert len(found) == MOST_REASONS + 1
    assert found[("Other",)] == 500 - MOST_REASONS + 5
    metrics.child_write("StatefulSet", "create")
    metrics.child_write("StatefulSet", "create")
    metrics.child_write("Whatever", "shout")
    assert samples(metrics, "inflight_child_writes_total") == {("StatefulSet", "create"): 2, ("Other", "Other"): 1}


def test_every_phase_is_always_there() -> None:
    metrics = OperatorMetrics()
    zero = {(phase,): 0.0 for phase in get_args(Phase)}
    assert len(zero) == 8
    assert samples(metrics, "inflight_jobs") == zero
    metrics.phases({"Running": 3, "Failed": 1, "": 4})
    assert samples(metrics, "inflight_jobs") == {**zero, ("Running",): 3, ("Failed",): 1}
    metrics.phases({"Succeeded": 3})
    assert samples(metrics, "inflight_jobs") == {**zero, ("Succeeded",): 3}


async def test_the_queue_is_read_when_somebody_asks() -> None:
    async def nothing(key: str) -> float | None:
        return None

    metrics, queue = OperatorMetrics(), WorkQueue(nothing)
    metrics.watch(queue)
    assert samples(metrics, "inflight_queue_depth") == {(): 0}
    queue.add("a")
    queue.add("b")
    assert samples(metrics, "inflight_queue_depth") == {(): 2}
    assert samples(metrics, "inflight_queue_oldest_seconds")[()] >= 0


def test_leadership_and_what_runs() -> None:
    metrics = OperatorMetrics()
    assert samples(metrics, "inflight_leader") == {(): 0}
    metrics.leader(True)
    assert samples(metrics, "inflight_leader") == {(): 1}
    ((revision, version),) = samples(metrics, "inflight_build_info")
    assert version
    assert revision == BUILDER_REVISION
    assert samples(metrics, "process_resident_memory_bytes")[()] > 0


def test_no_label_names_a_job() -> None:
    metrics = OperatorMetrics()
    metrics.attempt(attempt())
    metrics.attempt(attempt(ValueError("team/letters")))
    assert "letters" not in generate_latest(metrics.registry).decode()
