"""Which containers of a job's pods have logs."""

from typing import Any

from inflight_runtime.cluster.logs import Request
from inflight_runtime.cluster.pods import containers


def pod(name: str, role: str, states: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    statuses = [{"name": container, "restartCount": 0, **state} for container, state in states.items()]
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"inflight.dev/role": role}},
        "spec": {"containers": [{"name": container} for container in states], **more},
        "status": {"containerStatuses": statuses},
    }


RUNNING = {"state": {"running": {}}}
ENDED = {"state": {"terminated": {"exitCode": 1}}}


def test_only_what_has_started_has_a_log_and_only_what_runs_goes_on() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    backing_off = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ENDED["state"], "restartCount": 3}
    pods = [
        pod("x-actor-d", "actor", {"actor": backing_off}),
        pod("x-actor-c", "actor", {"actor": waiting}),
        pod("x-actor-b", "actor", {"actor": ENDED}),
        pod("x-actor-a", "actor", {"actor": RUNNING}),
    ]
    found = containers(pods)
    assert [one.source for one in found] == ["x-actor-a", "x-actor-b", "x-actor-c", "x-actor-d"]
    assert [(one.started, one.running, one.has_previous) for one in found] == [
        (True, True, False),
        (True, False, False),
        (False, False, False),
        (True, False, True),
    ]
    assert found[2].waits_for == "ImagePullBackOff"
    assert found[3].key == ("uid-x-actor-d", "actor", 3)


def test_a_pod_without_a_node_says_so() -> None:
    unscheduled = pod("x-inference-0", "inference", {"inference": {}})
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    unscheduled["status"] = {"conditions": [condition]}
    assert [(one.started, one.waits_for) for one in containers([unscheduled])] == [(False, "Unschedulable")]


def test_sidecars_are_left_out_and_the_models_first_downloads_are_not() -> None:
    server = pod("x-inference-0", "inference", {"inference": RUNNING, "proxy": RUNNING})
    fetch = pod("x-model-abc", "model", {"model": RUNNING}, initContainers=[{"name": "model-0"}])
    fetch["status"]["initContainerStatuses"] = [{"name": "model-0", "restartCount": 0, **ENDED}]
    sources = [one.source for one in containers([server, fetch])]
    assert sources == ["x-inference-0", "x-model-abc/model-0", "x-model-abc"]
    # A pod whose container has another name is shown all the same.
    assert [one.name for one in containers([pod("x", "actor", {"c": RUNNING})])] == ["c"]


def test_a_role_a_pod_or_the_end_of_its_name_is_asked_for() -> None:
    everything, role = Request("x"), Request("x", "inference")
    assert everything.selector == "inflight.dev/job=x"
    assert role.selector == "inflight.dev/job=x,inflight.dev/role=inference"
    assert role.wants("x-inference-0")
    for what in ("inference-0", "x-inference-0"):
        one = Request("x", what)
        assert one.selector == everything.selector
        assert one.wants("x-inference-0")
        assert not one.wants("x-inference-01")
