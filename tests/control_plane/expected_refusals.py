"""Which of the operator's calls the API server may refuse, and why each is no mistake. Any other 4xx is one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .cluster import AuditEvent
from .operator_process import OPERATORS


@dataclass(frozen=True)
class Expected:
    """A refusal that is in order.

    Attributes:
        verbs: of the call.
        resource: of the call, a pattern for all of it.
        code: HTTP status.
        why: it is in order.
        says: pattern for a part of the server's message.
    """

    verbs: str
    resource: str
    code: int
    why: str
    says: str = ""


EXPECTED = (
    Expected("get", "secrets", 404, "Secrets are not watched: whether there is one is found out by asking"),
    Expected("get", "leases", 404, "a standby waits for the Lease to be installed"),
    Expected("patch", "leases", 409, "two contenders wrote at once; one of them is refused, as it must be"),
    Expected("patch delete", ".*", 404, "deleted a moment ago, and the watch has not said so yet"),
    Expected(
        "patch delete", ".*", 409, "the uid or version in the write is not the object's any more: made anew meanwhile"
    ),
    Expected(
        "create", ".*", 409, "a POST comes first and never takes over an object: the name is taken", "already exists"
    ),
    Expected("create", ".*", 409, "the object of that name is on its way out", "is being deleted"),
    Expected("create", ".*", 403, "a namespace that is being deleted lets nothing in", "being terminated"),
    Expected("create", ".*", 404, "the namespace has just gone", "namespaces .* not found"),
    Expected("create", ".*", 403, "a quota or a policy, which is told in the job's status", "exceeded quota|denied"),
    Expected("get", "configmaps", 404, "the job names a ConfigMap that is not there, which is told in its status"),
    Expected("get", ".*", 404, "gone between the refusal of a write and the look at what is there"),
    Expected("list watch", "rltrainingjobs|jobsets", 404, "the CRD is not installed; looked for every few seconds"),
    Expected("list watch", "rltrainingjobs|jobsets", 429, "the CRD has just come", "storage is \\(re\\)initializing"),
    Expected("list watch", ".*", 410, "the version to go on from is too old; everything is listed anew"),
)


def refusals(events: Iterable[AuditEvent], users: Iterable[str] = ()) -> Counter[str]:
    """4xx answers to operators that no row of :data:`EXPECTED` explains, as text with counts.

    Args:
        events: of the audit log.
        users: whose; empty for all operators of this session.
    """
    who = set(users) or OPERATORS
    return Counter(
        f"{event.code} {event.verb} {event.resource}: {event.message}"
        for event in events
        if event.user in who and 400 <= event.code < 500 and not _is_expected(event)
    )


def _is_expected(event: AuditEvent) -> bool:
    return any(
        event.verb in row.verbs.split()
        and event.code == row.code
        and re.fullmatch(row.resource, event.resource)
        and re.search(row.says, event.message)
        for row in EXPECTED
    )
