"""Why pods are not there or not ready, from what the cluster says of them."""

from __future__ import annotations

from typing import Any

import pytest

from inflight_operator.diagnosis import (
    claim_cause,
    creation_cause,
    creation_reason,
    failed_pod,
    pod_causes,
    pods_left,
    replica_failure,
)
from inflight_operator.reasons import REASONS


def pod(name: str, role: str = "inference", phase: str = "Pending", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"inflight.dev/role": role}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, **status}}


def container(state: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"name": "inference", "image": "example.org/x:1", "state": state, **more}]


def waiting(reason: str, message: str = "") -> list[dict[str, Any]]:
    return container({"waiting": {"reason": reason, "message": message}})


UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available"}
]


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (
            {"containerStatuses": waiting("ImagePullBackOff", 'Back-off pulling image "example.org/x:1"')},
            "ImagePullFailed",
            'pod p cannot have image example.org/x:1: Back-off pulling image "example.org/x:1"',
        ),
        (
            {"containerStatuses": waiting("InvalidImageName")},
            "ImagePullFailed",
            "pod p cannot have image example.org/x:1: InvalidImageName",
        ),
        (
            {"containerStatuses": waiting("CreateContainerConfigError", 'secret "s" not found')},
            "ContainerCannotStart",
            'pod p: secret "s" not found',
        ),
        (
            {
                "containerStatuses": container(
                    {"waiting": {"reason": "CrashLoopBackOff"}},
                    lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "killed\n"}},
                )
            },
            "Crashing",
            "pod p keeps ending: exit code 137 (OOMKilled): killed",
        ),
        (
            {"initContainerStatuses": waiting("ErrImagePull", "no such host")},
            "ImagePullFailed",
            "pod p cannot have image example.org/x:1: no such host",
        ),
        ({"conditions": UNSCHEDULABLE}, "Unschedulable", "pod p: 0/4 nodes are available"),
    ],
)
def test_a_pod_says_why_it_is_not_ready(status: dict[str, Any], reason: str, message: str) -> None:
    found = pod_causes([pod("p", **status)])["inference"]
    assert (found.reason, found.message) == (reason, message)


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"containerStatuses": waiting("ContainerCreating")},
        {"containerStatuses": waiting("PodInitializing")},
        {"phase": "Running", "containerStatuses": container({"running": {}})},
        {"conditions": [{"type": "PodScheduled", "status": "True"}]},
    ],
)
def test_a_pod_that_only_takes_its_time_says_nothing(status: dict[str, Any]) -> None:
    assert pod_causes([pod("p", **status)]) == {}


def test_what_a_person_has_to_mend_is_told_before_what_may_pass_whatever_the_order() -> None:
    pods = [
        pod("a", conditions=UNSCHEDULABLE),
        pod("b", containerStatuses=waiting("ErrImagePull", "x")),
        pod("c", "actor", conditions=UNSCHEDULABLE),
        pod("d", "trainer", containerStatuses=container({"running": {}})),
    ]
    for order in (pods, pods[::-1]):
        found = pod_causes(order)
        assert {role: cause.reason for role, cause in found.items()} == {
            "inference": "ImagePullFailed",
            "actor": "Unschedulable",
        }


def test_pods_that_are_being_deleted_say_nothing_but_count_until_they_have_gone() -> None:
    going = pod("a", conditions=UNSCHEDULABLE)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pod_causes([going]) == {}
    assert pods_left([going, pod("b", phase="Failed"), pod("c", phase="Succeeded")]) == {"inference": 1}


def test_of_several_failed_pods_the_first_one_knows_why() -> None:
    def ended(at: str, **more: Any) -> list[dict[str, Any]]:
        return container({"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": at, **more}})

    pods = [
        pod("a", "trainer", "Failed", containerStatuses=ended("2026-01-01T00:00:09Z", message="peer is gone")),
        pod("b", "trainer", "Failed", containerStatuses=ended("2026-01-01T00:00:01Z", message="out of memory")),
        pod("c", "actor", "Failed"),
    ]
    assert failed_pod(pods, "trainer") == "pod b: exit code 1: out of memory"
    assert failed_pod(pods, "inference") == ""
    evicted = pod("e", "trainer", "Failed", reason="Evicted", message="The node was low on memory")
    assert failed_pod([evicted], "trainer") == "pod e: Evicted The node was low on memory"


@pytest.mark.parametrize("effect", [1, 143])
def test_a_trainer_node_that_lost_another_one_is_not_the_cause_even_if_it_ended_first(effect: int) -> None:
    def ended(code: int, at: str) -> list[dict[str, Any]]:
        return container({"terminated": {"exitCode": code, "reason": "Error", "finishedAt": f"2026-01-01T00:00:{at}Z"}})

    pods = [
        pod("node-0", "trainer", "Failed", containerStatuses=ended(effect, "01")),
        pod("node-1", "trainer", "Failed", containerStatuses=ended(137, "02")),
    ]
    assert failed_pod(pods, "trainer").startswith("pod node-1: exit code 137")


CREATE = 'create Pod a-inference-0 in StatefulSet a-inference failed error: pods "a-inference-0" is forbidden: '


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (CREATE + "exceeded quota: q, requested: requests.cpu=1, used: 0, limited: 1m", "QuotaExceeded"),
        (CREATE + "failed quota: q: must specify limits.cpu for: c", "QuotaExceeded"),
        (CREATE + "[maximum cpu usage per Container is 1m, but limit is 8]", "LimitRangeViolated"),
        (
            CREATE + 'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)',
            "PodSecurityViolated",
        ),
        (CREATE + "no PriorityClass with name late was found", "PriorityClassMissing"),
        (CREATE + 'error looking up service account x/y: serviceaccount "y" not found', "ServiceAccountMissing"),
        (CREATE + "ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no", "AdmissionDenied"),
        ('Internal error occurred: failed calling webhook "x": connection refused', "WebhookUnavailable"),
        ('Job.batch "a-t-n-0" is invalid: spec.template.spec.dnsPolicy: Unsupported value', "InvalidPodTemplate"),
        ("something else", "PodsNotCreated"),
    ],
)
def test_why_a_controller_cannot_make_pods_gets_a_word(words: str, reason: str) -> None:
    assert creation_reason(words) == reason
    assert reason in REASONS


def event(reason: str, message: str, at: str, **more: Any) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": f"2026-01-01T00:00:{at}Z", **more}


def test_the_last_failure_of_a_controller_counts_unless_it_could_make_pods_since() -> None:
    failed = [event("FailedCreate", "exceeded quota: a", "01"), event("FailedCreate", "exceeded quota: b", "03")]
    found = creation_cause(failed)
    assert found is not None and (found.reason, found.message) == ("QuotaExceeded", "exceeded quota: b")
    assert creation_cause([*failed, event("SuccessfulCreate", "made", "02")]) == found
    assert creation_cause([*failed, event("SuccessfulCreate", "made", "03")]) == found
    assert creation_cause([*failed, event("SuccessfulCreate", "made", "04")]) is None
    assert creation_cause([event("Killing", "x", "01")]) is None
    newer = event("FailedCreate", "denied", "00", lastTimestamp=None, eventTime="2026-01-01T00:00:05.123456Z")
    later = creation_cause([*failed, newer])
    assert later is not None and later.reason == "AdmissionDenied"


def test_a_generated_name_in_a_message_is_no_news() -> None:
    messages = {
        cause.message
        for name in ("a-actor-12345-abcde", "a-actor-12345-vwxyz")
        if (cause := creation_cause([event("FailedCreate", f'pods "{name}" is forbidden: x', "01")])) is not None
    }
    assert messages == {'pods "a-actor-12345-..." is forbidden: x'}


def test_a_deployment_tells_by_its_own_condition() -> None:
    words = 'pods "a-b-c" is forbidden: exceeded quota: q'
    failing = {"status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": words}]}}
    found = replica_failure(failing)
    assert found is not None and found.reason == "QuotaExceeded"
    assert replica_failure({"status": {"conditions": [{"type": "ReplicaFailure", "status": "False"}]}}) is None
    assert replica_failure({}) is None


def test_a_claim_tells_by_its_last_warning() -> None:
    normal = event("WaitForFirstConsumer", "waiting", "05", type="Normal")
    missing = event("ProvisioningFailed", 'storageclass.storage.k8s.io "x" not found', "03", type="Warning")
    found = claim_cause("c", [normal, missing])
    assert found is not None and found.reason == "ClaimPending"
    assert found.message == 'claim c has no volume: storageclass.storage.k8s.io "x" not found'
    assert claim_cause("c", [normal]) is None
