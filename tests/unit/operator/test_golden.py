"""Whole jobs against the manifests that are committed: what a change of the builders does is read in its diff.

``INFLIGHT_WRITE_GOLDEN=1`` writes them anew; the builders' revision is raised with them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight_operator.settings import Settings
from inflight_runtime.api import RLTrainingJob, load_job
from inflight_runtime.api.loading import dump_yaml
from support.cluster_jobs import CODE, SETTINGS, children, make_job, on_nodes

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parents[3] / "examples"
GUARDED = SETTINGS.model_copy(
    update={
        "operator_namespace": "inflight-system",
        "scrape_from": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    }
)
JOBS: dict[str, tuple[RLTrainingJob, Settings]] = {
    "sort-letters": (load_job(EXAMPLES / "sort-letters" / "job.yaml"), SETTINGS),
    "maximal": (on_nodes(load_job(GOLDEN / "maximal.job.yaml"), 4, 4), GUARDED),
    "claims": (
        make_job(
            "claims",
            model={"source": None, "volume": {"claimName": "models", "subPath": "qwen"}},
            checkpoint={"claimName": "checkpoints"},
        ),
        SETTINGS,
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_children_of_a_job_are_those_committed(name: str) -> None:
    job, settings = JOBS[name]
    found = children(job, settings, code=CODE)
    text = "---\n".join(dump_yaml(child.manifest) for child in found)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("INFLIGHT_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), "run the test with INFLIGHT_WRITE_GOLDEN=1 if the change is meant"


@pytest.mark.parametrize("name", JOBS)
def test_no_two_places_share_an_object(name: str) -> None:
    job, settings = JOBS[name]
    for child in children(job, settings, code=CODE):
        assert "&id" not in dump_yaml(child.manifest), child.name


@pytest.mark.parametrize("name", JOBS)
def test_building_twice_gives_the_same(name: str) -> None:
    job, settings = JOBS[name]
    assert children(job, settings, code=CODE) == children(job, settings, code=CODE)
