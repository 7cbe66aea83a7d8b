"""Measures the operator on a control plane of its own: ``python benchmarks/operator_load.py [--jobs 200]``.

Prints one JSON object. The API server, its controllers and the JobSet controller are real, nodes and pods are played by
kwok; the operator acts under the shipped ClusterRole, and nothing answers in place of the coordinators. Who asked the
API server for what, and when, is read from its audit log. Progress goes to standard error.

A missed target is reported and fails nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Target, spread
from machine_facts import environment_facts, tell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import psutil  # noqa: E402
import yaml  # noqa: E402
from kubernetes import client, watch  # noqa: E402

from control_plane.cluster import AuditEvent, Cluster, ClusterError, eventually, running_cluster  # noqa: E402
from control_plane.cluster import cluster as cluster_module  # noqa: E402
from control_plane.cluster.client import connect  # noqa: E402
from control_plane.expected_refusals import refusals  # noqa: E402
from control_plane.operator_process import NEWER_IMAGES, OperatorProcess, operator_for  # noqa: E402

EXAMPLE = ROOT / "examples" / "sort-letters" / "job.yaml"
GROUP, VERSION, PLURAL = "inflight.dev", "v1alpha1", "rltrainingjobs"
NODES = 40
"""Of 64 CPUs and 250 pods each: nothing of what is measured waits for room."""
REST_S = 60.0
QUIET_S = 5.0
POSTS_AT_ONCE = 16
EDITS = 10
UPGRADED = 50
STATUS_AND_EVENTS = ("rltrainingjobs/status", "events")
DEADLINE_S = 1200.0
TARGETS = (
    Target("children_s_p95", most=2.0),
    Target("rss_mb_peak", most=150.0),
    Target("writes_at_rest", most=0),
    Target("child_writes_of_an_upgrade", most=0),
    Target("repair_s_max", most=5.0),
)


def say(text: str) -> None:
    print(f"bench {time.strftime('%T')}: {text}", file=sys.stderr, flush=True)


class Phases:
    """When each job was first seen in each phase, from a watch of its own."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._custom = client.CustomObjectsApi(api)
        self._namespace = namespace
        self._seen: dict[tuple[str, str], float] = {}
        self._phase: dict[str, str] = {}
        self._ended = threading.Event()
        self._watch = watch.Watch()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more: a thread that still reads would abort the interpreter when it ends."""
        self._ended.set()
        self._watch.stop()

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            with contextlib.suppress(Exception):
                stream = self._watch.stream(
                    self._custom.list_namespaced_custom_object, GROUP, VERSION, self._namespace, PLURAL
                )
                for event in stream:
                    found = event["object"]
                    name, phase = found["metadata"]["name"], (found.get("status") or {}).get("phase", "")
                    self._phase[name] = phase if event["type"] != "DELETED" else "gone"
                    self._seen.setdefault((name, phase), time.time())

    def at(self, name: str, phase: str) -> float | None:
        return self._seen.get((name, phase))

    def all_in(self, names: Sequence[str], phase: str) -> bool:
        return all(self._phase.get(name) == phase for name in names)


@dataclass
class Usage:
    """What the operator has used since some moment."""

    process: psutil.Process
    cpu_s: float

    @classmethod
    def of(cls, operator: OperatorProcess) -> Usage:
        process = psutil.Process(operator.pid)
        return cls(process, _cpu(process))

    def figures(self) -> dict[str, float]:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return {
            "rss_mb": round(self.process.memory_info().rss / 1e6, 1),
            "rss_mb_peak": round(peak * 1024 / 1e6, 1),
            "cpu_s": round(_cpu(self.process) - self.cpu_s, 2),
        }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def example(name: str) -> dict[str, Any]:
    job = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    job["metadata"]["name"] = name
    return dict(job)


class Bench:
    """The control plane, the operator on it, and who looks on."""

    def __init__(self, cluster: Cluster, namespace: str, operator: OperatorProcess, api: client.ApiClient) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.operator = operator
        self.custom = client.CustomObjectsApi(api)
        self.apps = client.AppsV1Api(api)
        self.phases = Phases(api, namespace)

    def post(self, name: str) -> None:
        self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, example(name))

    def calls(self, since: int) -> list[AuditEvent]:
        """The operator's calls, its watches apart."""
        return [e for e in self.cluster.audit.events(since) if e.user == self.operator.user and e.verb != "watch"]

    def writes(self, since: int) -> list[AuditEvent]:
        return [event for event in self.calls(since) if event.is_write]

    def wait_quiet(self) -> None:
        """Wait until nothing has been written for a while."""

        def quiet() -> bool:
            since = self.cluster.audit.position()
            time.sleep(QUIET_S)
            return not self.writes(since)

        eventually("the operator comes to rest", quiet, DEADLINE_S)

    def children_s(self, names: Sequence[str], since: int) -> list[float]:
        """For each job the time from the answer to its POST to that of the last child's creation."""
        events = self.cluster.audit.events(since)
        posted = {e.name: e.answered for e in events if e.resource == PLURAL and e.verb == "create"}
        last: dict[str, float] = {}
        for event in events:
            made = event.user == self.operator.user and event.verb == "create" and event.code == 201
            if made and event.resource != "events" and (job := _job_of(event.name, posted)):
                last[job] = max(last.get(job, 0.0), event.answered)
        return [last[name] - posted[name] for name in names]


def _job_of(child: str, jobs: dict[str, float]) -> str:
    return "-".join(child.split("-")[:2]) if "-".join(child.split("-")[:2]) in jobs else ""


def one_after_another(bench: Bench, count: int) -> dict[str, Any]:
    """Jobs applied one by one: how soon they are there."""
    say(f"{count} jobs, one after another")
    since = bench.cluster.audit.position()
    names = [f"one-{number:03}" for number in range(count)]
    running = []
    for name in names:
        bench.post(name)
        posted = time.time()
        eventually(f"{name} runs", lambda name=name: bench.phases.all_in([name], "Running"), 60.0)
        running.append((bench.phases.at(name, "Running") or 0.0) - posted)
    return {
        "children_s": spread(bench.children_s(names, since), 3),
        "running_s": spread(running, 3),
    }


def clear(bench: Bench) -> None:
    """Delete all jobs and wait until nothing is left of them."""
    say("deleting all jobs")
    bench.custom.delete_collection_namespaced_custom_object(GROUP, VERSION, bench.namespace, PLURAL)
    bench.cluster.kubectl("delete", "pvc", "--all", "-n", bench.namespace, "--wait=false")

    def gone() -> bool:
        kinds = "jobsets,statefulsets,deployments,services,secrets,persistentvolumeclaims,pods"
        return not bench.cluster.kubectl("get", kinds, "-n", bench.namespace, "-o", "name", deadline_s=60).split()

    eventually("everything is gone", gone, DEADLINE_S)
    bench.wait_quiet()


def all_at_once(bench: Bench, count: int) -> tuple[dict[str, Any], list[str]]:
    """Many jobs at once: how long it takes, and what it costs."""
    say(f"{count} jobs at once")
    since = bench.cluster.audit.position()
    before, usage = bench.operator.metrics(), Usage.of(bench.operator)
    names = [f"many-{number:03}" for number in range(count)]
    began = time.time()
    with ThreadPoolExecutor(POSTS_AT_ONCE) as pool:
        list(pool.map(bench.post, names))
    posted = time.time()
    eventually("all run", lambda: bench.phases.all_in(names, "Running"), DEADLINE_S)
    running = time.time()
    bench.wait_quiet()
    used, after = usage.figures(), bench.operator.metrics()
    calls = bench.calls(since)
    last = max(event.answered for event in calls if event.verb == "create" and event.resource != "events")
    reads = Counter(event.verb for event in calls if not event.is_write)
    writes = Counter(event.verb for event in calls if event.is_write)
    what = Counter(f"{event.verb} {event.resource}" for event in calls)
    return {
        "jobs": count,
        "posting_s": round(posted - began, 2),
        "all_children_s": round(last - began, 2),
        "children_s": spread(bench.children_s(names, since), 2),
        "all_running_s": round(running - began, 2),
        "calls_per_job": {verb: round(number / count, 2) for verb, number in (reads + writes).most_common()},
        "reads_per_job": round(reads.total() / count, 2),
        "writes_per_job": round(writes.total() / count, 2),
        "calls_per_job_in_detail": {name: round(number / count, 2) for name, number in what.most_common()},
        "reconciles_per_job": round(_delta(before, after, "inflight_reconcile_seconds_count") / count, 1),
        "reconcile_s_p95": _histogram_percentile(before, after, 0.95),
        "reconcile_s_mean": round(
            _delta(before, after, "inflight_reconcile_seconds_sum")
            / max(1.0, _delta(before, after, "inflight_reconcile_seconds_count")),
            4,
        ),
        "failed_reconciles": _delta(before, after, 'inflight_reconciles_total{result="error"}'),
        "operator": used,
    }, names


def _delta(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _histogram_percentile(before: dict[str, float], after: dict[str, float], part: float) -> float:
    """Upper bound of the bucket in which a percentile lies."""
    prefix = 'inflight_reconcile_seconds_bucket{le="'
    counts = {
        float(name.removeprefix(prefix).rstrip('"}')): _delta(before, after, name)
        for name in after
        if name.startswith(prefix)
    }
    total = max(counts.values())
    return min(bound for bound, count in counts.items() if count >= part * total)


def rest(bench: Bench) -> dict[str, Any]:
    """A minute in which nothing happens."""
    say(f"{REST_S:.0f} s at rest")
    bench.wait_quiet()
    since, usage = bench.cluster.audit.position(), Usage.of(bench.operator)
    time.sleep(REST_S)
    calls = bench.calls(since)
    return {
        "writes": sum(event.is_write for event in calls),
        "reads": sum(not event.is_write for event in calls),
        "operator": usage.figures(),
    }


def restart(bench: Bench, count: int) -> dict[str, Any]:
    """What a restart costs while all jobs run."""
    say("restarting the operator")
    since = bench.cluster.audit.position()
    bench.operator.stop()
    began = time.monotonic()
    bench.operator.start()
    bench.operator.wait_watching()
    usage = Usage(psutil.Process(bench.operator.pid), 0.0)

    def all_seen() -> bool:
        return bench.operator.metrics().get('inflight_reconciles_total{result="success"}', 0) >= count

    eventually("every job has been looked at", all_seen, DEADLINE_S)
    looked = time.monotonic() - began
    bench.wait_quiet()
    calls = bench.calls(since)
    return {
        "all_looked_at_s": round(looked, 1),
        "writes": sum(event.is_write for event in calls),
        "reads": sum(not event.is_write for event in calls),
        "operator": usage.figures(),
    }


def repair(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """Edit and delete children by hand: seconds until they are as they were."""
    say("editing children by hand")
    edited, deleted = [], []
    for name in names[:EDITS]:
        body = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}}
        before = _grace(bench, name)
        bench.apps.patch_namespaced_deployment(f"{name}-actor", bench.namespace, body)
        edited.append(_until(lambda name=name, before=before: _grace(bench, name) == before))
        bench.apps.delete_namespaced_stateful_set(f"{name}-coordinator", bench.namespace)
        deleted.append(_until(lambda name=name: _stateful_set_lives(bench, f"{name}-coordinator")))
    return {"edited_s": spread(edited, 3), "deleted_s": spread(deleted, 3)}


def upgrade(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """A newer operator, with other children and default images in it: what it leaves alone, and when it acts."""
    say(f"upgrading the operator under {len(names)} jobs")
    since = bench.cluster.audit.position()
    bench.operator.stop()
    bench.operator.become_newer()
    bench.operator.start()
    bench.operator.wait_watching()
    eventually(
        "every job has been looked at",
        lambda: bench.operator.metrics().get('inflight_reconciles_total{result="success"}', 0) >= len(names),
        DEADLINE_S,
    )
    bench.wait_quiet()
    child_writes = sum(event.resource not in STATUS_AND_EVENTS for event in bench.writes(since))
    chosen = names[:UPGRADED]
    say(f"suspending and resuming {len(chosen)} of them")
    began = time.monotonic()
    _suspend(bench, chosen, True)
    eventually("they are suspended", lambda: bench.phases.all_in(chosen, "Suspended"), DEADLINE_S)
    _suspend(bench, chosen, False)
    eventually("they run", lambda: bench.phases.all_in(chosen, "Running"), DEADLINE_S)
    took = time.monotonic() - began
    stateful_sets = bench.apps.list_namespaced_stateful_set(bench.namespace).items
    newer = {
        item.metadata.labels["inflight.dev/job"]
        for item in stateful_sets
        if item.spec.template.spec.containers[0].image.startswith(NEWER_IMAGES)
    }
    return {
        "jobs": len(names),
        "child_writes_before_a_resume": child_writes,
        "resumed": len(chosen),
        "suspended_and_resumed_s": round(took, 1),
        "resumed_at_the_new_revision": len(newer & set(chosen)),
        "others_at_the_new_revision": len(newer - set(chosen)),
    }


def _suspend(bench: Bench, names: Sequence[str], suspend: bool) -> None:
    body = {"spec": {"suspend": suspend}}
    with ThreadPoolExecutor(POSTS_AT_ONCE) as pool:
        patch = bench.custom.patch_namespaced_custom_object
        list(pool.map(lambda name: patch(GROUP, VERSION, bench.namespace, PLURAL, name, body), names))


def _grace(bench: Bench, name: str) -> Any:
    found = bench.apps.read_namespaced_deployment(f"{name}-actor", bench.namespace)
    return found.spec.template.spec.termination_grace_period_seconds


def _stateful_set_lives(bench: Bench, name: str) -> bool:
    try:
        found = bench.apps.read_namespaced_stateful_set(name, bench.namespace)
    except client.ApiException as error:
        if error.status == 404:
            return False
        raise
    return found.metadata.deletion_timestamp is None


def _until(probe: Callable[[], bool]) -> float:
    began = time.monotonic()
    eventually("it is repaired", probe, 60.0)
    return time.monotonic() - began


@contextlib.contextmanager
def bench_on_its_own(scratch: Path) -> Iterator[Bench]:
    cluster_module.NODES = NODES
    with (
        running_cluster() as cluster,
        cluster.namespace() as namespace,
        connect(cluster.kubeconfig) as api,
        operator_for(cluster, "", scratch, account_namespace=namespace) as operator,
    ):
        operator.start()
        operator.wait_watching()
        bench = Bench(cluster, namespace, operator, api)
        try:
            yield bench
        finally:
            bench.phases.close()


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    measured: dict[str, Any] = {}

    def note(name: str, figures: dict[str, Any]) -> dict[str, Any]:
        measured[name] = figures
        say(f"{name}: {json.dumps(figures)}")
        return figures

    with bench_on_its_own(scratch) as bench:
        single = note("one_after_another", one_after_another(bench, options.singles))
        clear(bench)
        many, names = all_at_once(bench, options.jobs)
        note("all_at_once", many)
        resting = note("at_rest", rest(bench))
        restarted = note("restart", restart(bench, options.jobs))
        resting_after = note("at_rest_after_restart", rest(bench))
        repaired = note("repair", repair(bench, names))
        upgraded = note("upgrade", upgrade(bench, names))
        note("unexpected_refusals", dict(refusals(bench.cluster.audit.events(), [bench.operator.user])))
    values = {
        "children_s_p95": single["children_s"]["p95"],
        "rss_mb_peak": max(part["operator"]["rss_mb_peak"] for part in (many, resting, restarted, resting_after)),
        "writes_at_rest": resting["writes"] + resting_after["writes"],
        "child_writes_of_an_upgrade": upgraded["child_writes_before_a_resume"],
        "repair_s_max": max(repaired["edited_s"]["max"], repaired["deleted_s"]["max"]),
    }
    return measured | {"targets": {target.name: target.judge(values[target.name]) for target in TARGETS}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--singles", type=int, default=50, help="jobs applied one after another (default 50)")
    parser.add_argument("--jobs", type=int, default=200, help="jobs applied at once (default 200)")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts, began = environment_facts(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
            measured = measure(options, Path(scratch))
    except ClusterError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    result = {"environment": facts, "seconds": round(time.monotonic() - began, 1), **measured}
    tell(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
