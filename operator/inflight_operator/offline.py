"""The children of a job without a cluster, to be read: what ``inflight render --kubernetes`` prints."""

from __future__ import annotations

from typing import Final

from inflight_operator.builders import Facts, build_children
from inflight_operator.merge import MergeError
from inflight_operator.settings import Settings
from inflight_runtime.api import JobError, Problem, RLTrainingJob
from inflight_runtime.api.loading import dump_yaml

UID: Final = "00000000-0000-0000-0000-000000000000"
"""Stands for the job's uid, which the API server gives."""
TOKEN: Final = "made-by-the-operator"  # noqa: S105  stands for a secret


def render_children(job: RLTrainingJob, settings: Settings) -> str:
    """All children of a job as one YAML text, in the order in which the operator applies them.

    The uid and the token are placeholders, and the copy of the environment's ConfigMap is empty.

    Raises:
        JobError: an overlay cannot be merged.
    """
    facts = Facts(namespace=job.metadata.namespace or "default", uid=UID, token=TOKEN)
    try:
        children = build_children(job, settings, facts)
    except MergeError as error:
        remedy = "mend the overlay; it is a partial PodTemplateSpec"
        raise JobError([Problem("spec", None, str(error), remedy)], job.name) from error
    return "---\n".join(dump_yaml(child.manifest) for child in children)
