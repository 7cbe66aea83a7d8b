"""What the arguments of ``inflight status`` and ``inflight logs`` mean."""

import pytest

from inflight_runtime.target import Cluster, TargetError, job_in_cluster

HERE = Cluster()
THERE = Cluster(namespace="team")


@pytest.mark.parametrize(
    ("text", "cluster", "job"),
    [
        (None, HERE, None),
        ("runs/latest", HERE, None),
        ("sort-letters", HERE, None),
        ("./rltj", HERE, None),
        ("rltj/", HERE, None),
        ("rltj/Not_A_Name", HERE, None),
        ("rltj", HERE, ""),
        ("rltj/sort-letters", HERE, "sort-letters"),
        ("rltrainingjob/sort-letters", HERE, "sort-letters"),
        ("rltrainingjobs.inflight.dev/sort-letters", HERE, "sort-letters"),
        (None, THERE, ""),
        ("rltj", THERE, ""),
        ("sort-letters", THERE, "sort-letters"),
        ("rltj/sort-letters", THERE, "sort-letters"),
        ("sort-letters", Cluster(context="kind"), "sort-letters"),
        (None, Cluster(all_namespaces=True), ""),
        (None, Cluster(kubeconfig="config"), ""),
    ],
)
def test_a_directory_or_a_job_is_meant(text: str | None, cluster: Cluster, job: str | None) -> None:
    assert job_in_cluster(text, cluster) == job


@pytest.mark.parametrize(
    ("text", "cluster", "words"),
    [
        ("runs/latest", THERE, "there are only jobs to look at; write rltj/latest"),
        ("pod/sort-letters-t-n-0-0", THERE, "write rltj/sort-letters-t-n-0-0"),
        ("./runs/x", THERE, "is no job's name, and with these options a job in a cluster is meant"),
        (None, Cluster(namespace="team", all_namespaces=True), "--all-namespaces: excludes --namespace"),
    ],
)
def test_what_can_be_neither_is_refused(text: str | None, cluster: Cluster, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        job_in_cluster(text, cluster)
