"""How a job's pods are found: the labels that the operator puts on all of a job's children."""

from __future__ import annotations

from typing import Final

JOB_LABEL: Final = "inflight.dev/job"
ROLE_LABEL: Final = "inflight.dev/role"


def selector(job: str, role: str = "") -> dict[str, str]:
    """Labels that pick a role's pods, or without ``role`` all pods of the job; they never change."""
    return {JOB_LABEL: job, **({ROLE_LABEL: role} if role else {})}


def selector_text(job: str, role: str = "") -> str:
    """:func:`selector` as the API takes it in a query and the scale subresource shows it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(job, role).items()))
