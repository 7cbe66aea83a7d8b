"""The operator's own Prometheus metrics. No label ever has a job's name: the number of series is bounded."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from inflight_operator.builders import BUILDER_REVISION
from inflight_operator.kube import KINDS, KubeError
from inflight_operator.workqueue import Attempt, WorkQueue
from inflight_runtime.api.enums import Phase

PHASES: Final[tuple[str, ...]] = get_args(Phase)
VERBS: Final = ("create", "apply", "patch", "delete")
MOST_REASONS: Final = 40
OTHER: Final = "Other"
"""Stands for label values beyond the bound, or ones that are no word."""
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


class OperatorMetrics:
    """Counts what the operator does, in a registry of its own.

    Attributes:
        registry: all of it, and what the process uses (CPU, memory, open files).
    """

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = Counter(
            "inflight_reconciles_total", "Reconciles that ended.", ["result"], registry=self.registry
        )
        self._errors = Counter(
            "inflight_reconcile_errors_total",
            "Reconciles that failed, by the API server's word or the exception.",
            ["reason"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "inflight_reconcile_seconds", "Time one reconcile took.", buckets=SECONDS, registry=self.registry
        )
        self._depth = Gauge("inflight_queue_depth", "Jobs that wait for a worker.", registry=self.registry)
        self._oldest = Gauge(
            "inflight_queue_oldest_seconds",
            "How long the oldest waiting or running reconcile has been at it.",
            registry=self.registry,
        )
        self._jobs = Gauge("inflight_jobs", "Jobs in each phase.", ["phase"], registry=self.registry)
        self._writes = Counter(
            "inflight_child_writes_total",
            "Writes to the objects that jobs are made of.",
            ["kind", "verb"],
            registry=self.registry,
        )
        self._leader = Gauge("inflight_leader", "1 in the one operator that acts.", registry=self.registry)
        Gauge(
            "inflight_build_info",
            "Always 1; the labels say what runs.",
            ["version", "builder_revision"],
            registry=self.registry,
        ).labels(importlib.metadata.version("inflight"), BUILDER_REVISION).set(1)
        self._reasons: set[str] = set()
        for result in ("success", "error"):
            self._reconciles.labels(result)
        self.phases({})

    def watch(self, queue: WorkQueue) -> None:
        """Read the queue's depth and its oldest entry when somebody asks for the metrics."""
        self._depth.set_function(lambda: len(queue))
        self._oldest.set_function(queue.oldest_wait_s)

    def attempt(self, attempt: Attempt) -> None:
        """Note a reconcile that has ended."""
        self._seconds.observe(attempt.seconds)
        if attempt.error is None:
            self._reconciles.labels("success").inc()
            return
        self._reconciles.labels("error").inc()
        self._errors.labels(self._reason(attempt.error)).inc()

    def child_write(self, kind: str, verb: str) -> None:
        """Note a write to a child.

        Args:
            kind: of the child, one of :data:`~inflight_operator.kube.KINDS`.
            verb: one of :data:`VERBS`.
        """
        self._writes.labels(kind if kind in KINDS else OTHER, verb if verb in VERBS else OTHER).inc()

    def phases(self, counts: Mapping[str, int]) -> None:
        """Set how many jobs there are in each phase; a phase that is left out has none."""
        for phase in PHASES:
            self._jobs.labels(phase).set(counts.get(phase, 0))

    def leader(self, leads: bool) -> None:
        """Set whether this process is the one that acts."""
        self._leader.set(leads)

    def _reason(self, error: BaseException) -> str:
        reason = error.reason if isinstance(error, KubeError) else type(error).__name__
        # A server, or a proxy in front of it, may send any text as the reason.
        known = reason in self._reasons
        if not known and (len(self._reasons) >= MOST_REASONS or _WORD.fullmatch(reason) is None):
            return OTHER
        self._reasons.add(reason)
        return reason
