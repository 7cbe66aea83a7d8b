"""What the API server's refusals mean. The messages are its own, of Kubernetes 1.34 with JobSet 0.11."""

from __future__ import annotations

import pytest

from inflight_operator.kube import KubeError
from inflight_operator.reasons import REASONS
from inflight_operator.refusals import refusal_of, shortened, stale

FORBIDDEN = "Forbidden"
SAID = [
    (
        403,
        'statefulsets.apps "a" is forbidden: exceeded quota: q, requested: count/statefulsets.apps=1, '
        "used: count/statefulsets.apps=0, limited: count/statefulsets.apps=0",
        "StatefulSet",
        "QuotaExceeded",
    ),
    (403, 'pods "a" is forbidden: failed quota: q: must specify limits.cpu for: c', "StatefulSet", "QuotaExceeded"),
    (
        403,
        'statefulsets.apps "a" is forbidden: status unknown for quota: q, resources: count/statefulsets.apps',
        "StatefulSet",
        "QuotaUnknown",
    ),
    (
        403,
        'persistentvolumeclaims "a" is forbidden: maximum storage usage per PersistentVolumeClaim is 1Mi, but request '
        "is 10Gi",
        "PersistentVolumeClaim",
        "LimitRangeViolated",
    ),
    (
        403,
        'statefulsets.apps is forbidden: User "system:serviceaccount:x:y" cannot create resource "statefulsets" in API '
        'group "apps" in the namespace "x"',
        "StatefulSet",
        "PermissionDenied",
    ),
    (
        403,
        'statefulsets.apps "a" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource '
        "you can't set finalizers on",
        "StatefulSet",
        "PermissionDenied",
    ),
    (
        403,
        'deployments.apps "a" is forbidden: unable to create new content in namespace x because it is being terminated',
        "Deployment",
        "NamespaceTerminating",
    ),
    (404, 'namespaces "x" not found', "ServiceAccount", "NamespaceTerminating"),
    (404, 'namespaces "x" not found', "JobSet", "NamespaceTerminating"),
    (404, "404 page not found\n", "JobSet", "JobSetMissing"),
    (404, "the server could not find the requested resource", "JobSet", "JobSetMissing"),
    (404, 'statefulsets.apps "a" not found', "StatefulSet", "NotFound"),
    (404, 'jobsets.jobset.x-k8s.io "a-t" not found', "JobSet", "NotFound"),
    (
        422,
        "deployments.apps \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no",
        "Deployment",
        "AdmissionDenied",
    ),
    (
        413,
        "deployments.apps \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no",
        "Deployment",
        "AdmissionDenied",
    ),
    (403, 'admission webhook "validate.kyverno.svc-fail" denied the request: no', "Service", "AdmissionDenied"),
    (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: no', "JobSet", "AdmissionDenied"),
    (
        500,
        'Internal error occurred: failed calling webhook "mjobset.kb.io": failed to call webhook: Post "https://'
        'x.svc:443/": dial tcp 127.0.0.1:1: connect: connection refused',
        "JobSet",
        "WebhookUnavailable",
    ),
    (
        400,
        'admission webhook "mjobset.kb.io" denied the request: json: cannot unmarshal number into Go struct field '
        "PodSpec.spec.replicatedJobs.template.spec.template.spec.nodeSelector of type string",
        "JobSet",
        "InvalidPodTemplate",
    ),
    (
        400,
        'StatefulSet in version "v1" cannot be handled as a StatefulSet: strict decoding error: unknown field '
        '"spec.template.spec.noSuchField"',
        "StatefulSet",
        "InvalidPodTemplate",
    ),
    (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: unknown field '
        '"spec.replicatedJobs[0].template.spec.template.spec.noSuchField"',
        "JobSet",
        "InvalidPodTemplate",
    ),
    (
        400,
        'JobSet in version "v1alpha2" cannot be handled as a JobSet: strict decoding error: unknown field '
        '"spec.failurePolicy.rules"',
        "JobSet",
        "JobSetTooOld",
    ),
    (
        422,
        'JobSet.jobset.x-k8s.io "a-t" is invalid: [spec.failurePolicy.rules[0].action: Unsupported value: '
        '"RestartJobSetAndIgnoreMaxRestarts": supported values: "FailJobSet", "RestartJobSet"]',
        "JobSet",
        "JobSetTooOld",
    ),
    (
        422,
        'Deployment.apps "a" is invalid: spec.template.spec.containers[0].image: Required value',
        "Deployment",
        "InvalidPodTemplate",
    ),
    (
        422,
        'PersistentVolumeClaim "a" is invalid: spec.resources[storage]: Invalid value: "-1": must be greater than zero',
        "PersistentVolumeClaim",
        "ClaimRefused",
    ),
    (422, 'ConfigMap "a" is invalid: []: Too long: may not be more than 1048576 bytes', "ConfigMap", "Refused"),
    (413, "Request entity too large: limit is 3145728", "ConfigMap", "Refused"),
    (403, 'pods "a" is forbidden: something nobody has heard of', "Service", "Forbidden"),
    (401, "Unauthorized", "Service", "Refused"),
    (429, "too many requests", "Service", "APIServerUnavailable"),
    (503, "etcdserver: leader changed", "Service", "APIServerUnavailable"),
    (409, 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified', "Service", "Conflict"),
    (0, "no answer to POST /x in 20 s", "Service", "APIServerUnavailable"),
]
STALLED = {"InvalidPodTemplate"}
PASSING = {"NamespaceTerminating", "APIServerUnavailable", "Conflict"}


@pytest.mark.parametrize(("status", "message", "kind", "reason"), SAID)
def test_a_refusal_gets_a_word_that_stays_and_keeps_the_servers_own(
    status: int, message: str, kind: str, reason: str
) -> None:
    refusal = refusal_of(KubeError(status, "Word", message), kind, "a")
    assert refusal.cause.reason == reason
    assert refusal.cause.message.startswith(f"{kind} a: ")
    if status and reason != "JobSetMissing":
        assert " ".join(message.split()) in refusal.cause.message
    assert refusal.stalled == (reason in STALLED) == REASONS[reason].stalled
    assert refusal.passing == (reason in PASSING and (status, kind) not in ((404, "ServiceAccount"), (404, "JobSet")))


@pytest.mark.parametrize(
    ("status", "reason", "message", "expected"),
    [
        (404, "NotFound", 'statefulsets.apps "a" not found', True),
        (409, "Conflict", "the object has been modified", True),
        (409, "Conflict", "uid mismatch: the provided object specified uid x, and no existing object was found", True),
        (422, "Invalid", 'X "a" is invalid: metadata.uid: Invalid value: "x": field is immutable', True),
        (409, "AlreadyExists", "already exists", False),
        (422, "Invalid", "spec: Forbidden", False),
        (500, "InternalError", "x", False),
        (0, "Unreachable", "x", False),
    ],
)
def test_a_write_that_missed_its_object_is_told_from_one_that_was_refused(
    status: int, reason: str, message: str, expected: bool
) -> None:
    assert stale(KubeError(status, reason, message)) == expected


def test_a_message_is_one_line_of_bearable_length() -> None:
    assert shortened("a\n  b\tc") == "a b c"
    assert shortened("x" * 30, 10) == "xxxxxxx..."
    long = refusal_of(KubeError(422, "Invalid", "y" * 100_000), "Service", "a").cause.message
    assert len(long) == 2_000
