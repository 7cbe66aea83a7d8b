"""Prometheus metrics, read off the coordinator when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inflight_runtime.coordinator.snapshot import STATES

if TYPE_CHECKING:
    from inflight_runtime.coordinator.service import Coordinator

_COUNTERS = {
    "submitted": "Groups ever leased.",
    "leases_expired": "Leases whose actor fell silent.",
    "duplicates": "Results that had been taken before.",
    "fenced": "Results refused because the lease was lost.",
    "attempts_failed": "Attempts that failed for good.",
    "trainer_starts": "Times a trainer started.",
    "steps_skipped": "Steps that changed no weights: loss or gradient not finite, or nothing to train on.",
}


class Metrics(Collector):
    """The coordinator's registry: histograms kept as things happen, everything else read from the ledger's numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._coordinator: Coordinator | None = None
        self._requests = Histogram(
            "inflight_request_seconds",
            "Time to answer a request (long polls with their wait).",
            ["route", "status"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 30),
            registry=self._registry,
        )
        self._children: dict[tuple[str, str, int], Histogram] = {}
        self._operations = Histogram(
            "inflight_commit_operations",
            "Ledger operations in one transaction.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "inflight_commit_seconds",
            "Time to write one transaction.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1),
            registry=self._registry,
        )

    def attach(self, coordinator: Coordinator) -> None:
        """Read this coordinator's numbers from now on."""
        self._coordinator = coordinator
        self._registry.register(self)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Note one request."""
        key = (method, route, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._requests.labels(f"{method} {route}", str(status))
        child.observe(seconds)

    def observe_commit(self, operations: int, seconds: float) -> None:
        """Note one transaction."""
        self._operations.observe(operations)
        self._seconds.observe(seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read off the coordinator."""
        if self._coordinator is None:
            return
        state = self._coordinator.state()
        counts = self._coordinator.snapshot.counts
        groups = GaugeMetricFamily("inflight_groups", "Groups by state.", labels=["state"])
        for name in STATES:
            groups.add_metric([name], state.groups[name])
        yield groups
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"inflight_{name}", text, value=counts.get(name, 0))
        dropped = CounterMetricFamily("inflight_groups_dropped", "Groups dropped, by reason.", labels=["reason"])
        for reason, number in state.dropped.items():
            dropped.add_metric([reason], number)
        yield dropped
        for name, number in state.capacity.items():
            yield GaugeMetricFamily(f"inflight_capacity_{name}", f"Admission, in groups: {name}.", value=number)
        yield GaugeMetricFamily("inflight_policy_step", "Optimizer steps completed.", value=state.step)
        yield GaugeMetricFamily("inflight_steps", "Optimizer steps of the run.", value=state.steps)
        yield GaugeMetricFamily("inflight_epoch", "Epoch: trainer starts so far.", value=state.epoch)
        yield GaugeMetricFamily("inflight_actors", "Actors seen lately.", value=state.actors)
        outcome = GaugeMetricFamily("inflight_run", "1 for the run's outcome.", labels=["outcome"])
        for name in ("running", "succeeded", "failed"):
            outcome.add_metric([name], float(state.outcome == name))
        yield outcome
        members = GaugeMetricFamily("inflight_members", "Inference servers by state.", labels=["state"])
        for name in ("JOINING", "SYNCING", "READY", "UPDATING", "EVICTED"):
            members.add_metric([name], sum(member.state == name for member in state.members))
        yield members
        step = GaugeMetricFamily("inflight_server_step", "Step of the weights that a server serves.", labels=["server"])
        for member in state.members:
            if member.version is not None:
                step.add_metric([member.server_id], member.version.step)
        yield step
        reward = state.evaluation.get("reward_mean")
        if reward is not None:
            yield GaugeMetricFamily("inflight_evaluation_reward_mean", "Newest held-out reward.", value=reward)
