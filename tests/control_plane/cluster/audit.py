"""The API server's audit log: who asked for what, and what the answer was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .keeper import AUDIT_LOG

PARTS = ("apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy")
POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # With its body: the keeper reads from it which directories the provisioner has made.
        {
            "level": "Request",
            "verbs": ["create"],
            "resources": [{"group": "", "resources": ["persistentvolumes"]}],
        },
        # Four of five requests are those of the control plane itself, and nobody asks about the others of them.
        {"level": "Metadata", "verbs": ["delete"], "resources": [{"group": "", "resources": ["pods"]}]},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system", "system:nodes"]},
        {"level": "None", "users": [*(f"system:{name}" for name in PARTS), "jobset-controller", "kwok"]},
        {"level": "Metadata"},
    ],
}
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True)
class AuditEvent:
    """One answered request. ``resource`` includes the subresource (``pods/status``); both are empty for a bare URL.

    ``received`` and ``answered`` are Unix times by the API server's clock; ``reason`` and ``message`` are the API's
    words for a refusal.
    """

    verb: str
    user: str
    code: int
    group: str
    resource: str
    namespace: str
    name: str
    uri: str
    user_agent: str
    received: float
    answered: float
    reason: str
    message: str

    @property
    def is_write(self) -> bool:
        """Whether the request could change something."""
        return self.verb in WRITES


class AuditLog:
    """Reads the log of a running API server, which has written a request down before its client has the answer."""

    def __init__(self, state: Path) -> None:
        self.path = state / AUDIT_LOG

    def position(self) -> int:
        """Where the log ends now; give it to :meth:`events` to see only what came later."""
        return self.path.stat().st_size

    def events(self, since: int = 0) -> list[AuditEvent]:
        """Every request answered since a position; a watch appears when it ends."""
        with self.path.open("rb") as log:
            log.seek(since)
            whole, _, _ = log.read().rpartition(b"\n")
        records = [json.loads(line) for line in whole.splitlines()]
        return [_event(record) for record in records if record["stage"] == "ResponseComplete"]


def _event(record: dict[str, Any]) -> AuditEvent:
    what = record.get("objectRef", {})
    parts = (what.get("resource", ""), what.get("subresource", ""))
    return AuditEvent(
        verb=record["verb"],
        user=record["user"].get("username", ""),
        code=record.get("responseStatus", {}).get("code", 0),
        group=what.get("apiGroup", ""),
        resource="/".join(part for part in parts if part),
        namespace=what.get("namespace", ""),
        name=what.get("name", ""),
        uri=record["requestURI"],
        user_agent=record.get("userAgent", ""),
        received=_time(record["requestReceivedTimestamp"]),
        answered=_time(record["stageTimestamp"]),
        reason=record.get("responseStatus", {}).get("reason", ""),
        message=record.get("responseStatus", {}).get("message", ""),
    )


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
