"""Jobs as nobody would write them: valid, nearly valid, and meant badly."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from control_plane.jobs import SMALL

Json = dict[str, Any]

INTEGERS = st.one_of(st.sampled_from([-1, 0, 1, 2, 3, 1000, 2**31, 2**63 - 1, 10**30]), st.integers(-5, 20))
NUMBERS = st.one_of(INTEGERS, st.sampled_from([0.5, 1e-9, 1e308, -0.0, 1.0]))
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "a", "../../etc", "/models/tiny", "a/b", "${HOME}", "$(X)", "{{ x }}", "é漢", "x" * 5000]
    ),
    st.text(max_size=12),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
QUANTITIES = st.sampled_from(
    ["0", "1", "1m", "1e3", "100Gi", "1Ki", "-1", "1.5", "0.0001", "9999999999999Gi", "", "lots", 1, 1.5, None]
)
RESOURCES = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "hugepages-2Mi", "odd", "a b", ""])
FIELDS = st.sampled_from(
    [
        *("name", "image", "env", "value", "valueFrom", "command", "args", "ports", "containerPort", "resources"),
        *("requests", "limits", "cpu", "volumeMounts", "mountPath", "securityContext", "runAsUser", "privileged"),
        *("$patch", "$setElementOrder/containers", "$retainKeys", "noSuchField", "metadata", "labels", "spec"),
        *("nodeSelector", "tolerations", "affinity", "hostNetwork", "priority", "schedulerName", "nodeName"),
        *("restartPolicy", "serviceAccountName", "containers", "initContainers", "volumes", "emptyDir", "secret"),
        *("terminationGracePeriodSeconds", "dnsPolicy", "annotations", "livenessProbe", "httpGet", "exec", "port"),
    ]
)
TREES = st.recursive(
    SCALARS,
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(FIELDS, below, max_size=4)),
    max_leaves=10,
)
CONTAINER_NAMES = st.sampled_from(["coordinator", "inference", "actor", "trainer", "side", "Side", "", "x" * 70])
CONTAINERS = st.fixed_dictionaries({"name": CONTAINER_NAMES}, optional={"image": TEXTS, "env": TREES, "ports": TREES})
POD_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.one_of(TREES, st.lists(CONTAINERS, max_size=3)),
        "initContainers": st.lists(CONTAINERS, max_size=2),
        "volumes": st.lists(st.fixed_dictionaries({"name": TEXTS}, optional={"emptyDir": TREES}), max_size=2),
        "nodeSelector": st.dictionaries(TEXTS, SCALARS, max_size=2),
        "terminationGracePeriodSeconds": NUMBERS,
        "dnsPolicy": TEXTS,
        "hostNetwork": st.booleans(),
        "securityContext": TREES,
        "affinity": TREES,
        "tolerations": TREES,
    },
)
OVERLAYS = st.one_of(
    TREES,
    st.fixed_dictionaries({"spec": POD_SPECS}),
    st.fixed_dictionaries({"metadata": st.fixed_dictionaries({}, optional={"labels": TREES, "annotations": TREES})}),
)
AMOUNTS = st.dictionaries(RESOURCES, QUANTITIES, max_size=3)
NEEDS = st.fixed_dictionaries({}, optional={"requests": AMOUNTS, "limits": AMOUNTS})
ROLES = ("coordinator", "inference", "actors", "trainer")
CHANGES = st.one_of(
    st.tuples(st.sampled_from([f"{role}.podTemplate" for role in ROLES]), OVERLAYS),
    st.tuples(st.sampled_from([f"{role}.resources" for role in ROLES]), NEEDS),
    st.tuples(st.sampled_from([f"{role}.image" for role in ROLES[1:]]), TEXTS),
    st.tuples(st.sampled_from(["inference.replicas", "actors.replicas"]), st.one_of(st.none(), st.integers(0, 3))),
    st.tuples(
        st.sampled_from(
            [
                *("inference.replicas", "inference.tensorParallel", "actors.concurrency", "trainer.maxRestarts"),
                *("trainer.processesPerNode", "trainer.nodes", "algorithm.steps", "algorithm.groupSize"),
                *("algorithm.maxStaleness", "sampling.maxTokens", "sampling.temperature", "checkpoint.keep"),
                *("checkpoint.everySteps", "weightSync.deadlineSeconds", "lifecycle.activeDeadlineSeconds"),
            ]
        ),
        NUMBERS,
    ),
    st.tuples(
        st.sampled_from(
            [
                *("model.source", "model.revision", "environment.entrypoint", "environment.configMap"),
                *("scheduling.priorityClassName", "checkpoint.claimName", "checkpoint.resumeFrom", "inference.engine"),
                *("trainer.engine", "weightSync.transport", "checkpoint.storage", "coordinator.storage", "noSuch"),
            ]
        ),
        st.one_of(TEXTS, st.sampled_from(["late", "package.module:X"])),
    ),
    st.tuples(
        st.sampled_from(["checkpoint.storage", "coordinator.storage"]),
        st.fixed_dictionaries({}, optional={"size": QUANTITIES, "class": TEXTS, "accessModes": TREES}),
    ),
    st.tuples(st.sampled_from(["environment.args", "inference.engineArgs"]), st.dictionaries(TEXTS, TREES, max_size=3)),
    st.tuples(st.just("suspend"), st.booleans()),
)
NAMES = st.sampled_from(["a", "default", "a-t", "x-coordinator", "very-long-name-of-a-job-that-goes-on"])
STRANGE_NAMES = st.sampled_from(["A", "1a", "a.b", "a_b", "-a", "", "x" * 64, "a/b"])
LABELS = st.one_of(
    st.just({}),
    st.dictionaries(
        st.sampled_from(["inflight.dev/job", "app.kubernetes.io/managed-by", "kueue.x-k8s.io/queue-name", "team"]),
        st.sampled_from(["", "a", "inflight-operator"]),
        max_size=2,
    ),
)


def generated_jobs(count: int) -> list[Json]:
    """That many jobs, the same ones every time; names differ in their last number."""
    found: list[Json] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        name=st.one_of(NAMES, NAMES, NAMES, STRANGE_NAMES),
        labels=LABELS,
        changes=st.lists(CHANGES, min_size=0, max_size=3),
    )
    def collect(name: str, labels: Json, changes: list[tuple[str, Any]]) -> None:
        job = copy.deepcopy(SMALL)
        job["metadata"] = {"name": f"{name}-{len(found)}" if name else "", "labels": labels}
        job["spec"]["inference"]["replicas"] = 1
        for path, value in changes:
            _put(job["spec"], path.split("."), value)
        found.append(job)

    collect()
    return found[:count]


def _put(spec: Json, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        below = spec.setdefault(part, {})
        if not isinstance(below, dict):
            return
        spec = below
    spec[path[-1]] = value
