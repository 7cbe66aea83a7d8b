"""What the builders make is what a real API server takes, strictly: unknown fields, webhooks and all."""

from __future__ import annotations

import copy

import pytest

from control_plane.cluster import Cluster, KubectlError
from control_plane.operator_process import ROOT
from inflight_runtime.api import MAX_NAME_LENGTH, RLTrainingJob, load_job
from support.cluster_jobs import CODE, SETTINGS, children, make_job, on_nodes

GOLDEN = ROOT / "tests" / "unit" / "operator" / "golden"
GUARDED = SETTINGS.model_copy(update={"operator_namespace": "inflight-system", "scrape_from": {"podSelector": {}}})
MANY = 1_000


def longest(nodes: int) -> RLTrainingJob:
    """A job with every kind of child, the longest name, and a thousand of everything."""
    job = make_job(
        "j" * MAX_NAME_LENGTH,
        model={"source": "example-org/model", "tokenizer": "example-org/tokenizer"},
        environment={"configMap": "code"},
        inference={"replicas": MANY},
        actors={"replicas": MANY},
    )
    return on_nodes(job, nodes, 8)


JOBS = {
    "every field": lambda: on_nodes(load_job(GOLDEN / "maximal.job.yaml"), 4, 4),
    "the example": lambda: load_job(ROOT / "examples" / "sort-letters" / "job.yaml"),
    "the longest name and a thousand nodes": lambda: longest(MANY),
}


@pytest.mark.parametrize("case", JOBS)
def test_the_api_server_takes_every_child(case: str, cluster: Cluster, namespace: str) -> None:
    found = children(JOBS[case](), GUARDED, code=CODE, namespace=namespace)
    manifests = [copy.deepcopy(child.manifest) for child in found]
    for manifest in manifests:
        # Their owner does not exist; who may name one is another test's.
        manifest["metadata"].pop("ownerReferences", None)
    told = cluster.kubectl.create(manifests, "--validate=strict", "--dry-run=server")
    assert told.count("created (server dry run)") == len(manifests)


def test_one_letter_more_would_be_too_long_for_jobset(cluster: Cluster, namespace: str) -> None:
    # The limit on names is there for a reason: JobSet's webhook counts what its pods would be called.
    found = children(longest(MANY), GUARDED, code=CODE, namespace=namespace)
    job_set = copy.deepcopy(next(child.manifest for child in found if child.kind == "JobSet"))
    job_set["metadata"].pop("ownerReferences")
    spare = 63 - len(f"{job_set['metadata']['name']}-n-0-{MANY - 1}-abcde")
    assert spare >= 0
    job_set["metadata"]["name"] += "x" * (spare + 1)
    with pytest.raises(KubectlError, match="too long"):
        cluster.kubectl.create([job_set], "--dry-run=server", "-n", namespace)
