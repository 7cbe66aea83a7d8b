"""What is said of a kubeconfig that cannot be used, and of the API server's refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight_runtime.cluster.connection import JOBS, PODS, ClusterError, Connection
from inflight_runtime.target import Cluster


def kubeconfig(path: Path, **changes: Any) -> str:
    document: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "two", "context": {"cluster": "c", "user": "u"}},
        ],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "one",
    }
    path.write_text(yaml.safe_dump({**document, **changes}))
    return str(path)


async def place(cluster: Cluster) -> tuple[str, str]:
    async with await Connection.open(cluster) as connection:
        return connection.context, connection.namespace


async def test_context_and_namespace_are_the_kubeconfigs_unless_an_option_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path / "config")
    assert await place(Cluster(path)) == ("one", "team")
    assert await place(Cluster(path, "two")) == ("two", "default")
    assert await place(Cluster(path, "two", "other")) == ("two", "other")
    assert await place(Cluster(path, all_namespaces=True)) == ("one", "")
    # Several files, one of which is not there, as kubectl takes them.
    more = kubeconfig(tmp_path / "more", contexts=[{"name": "three", "context": {"cluster": "c", "namespace": "x"}}])
    monkeypatch.setenv("KUBECONFIG", f"{path}:{tmp_path / 'none'}:{more}")
    assert await place(Cluster("", "three")) == ("three", "x")


@pytest.mark.parametrize(
    ("text", "context", "words"),
    [
        ("{", "", "config is no kubeconfig that can be read"),
        ("[]", "", "config is no kubeconfig that can be read"),
        ("clusters: []\ncontexts: []\n", "", "config cannot be used"),
        ("contexts: [{name: a}]\ncurrent-context: b\n", "", "config cannot be used: .*choose one by --context: a"),
        ("contexts: [{name: a}]\n", "b", "there is no context b in .*config; there are a"),
        ("contexts: []\n", "b", "there is no context b in .*; the kubeconfig has none"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, text: str, context: str, words: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ClusterError, match=words):
        await Connection.open(Cluster(str(path), context))


async def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    cluster = {"server": "https://127.0.0.1:9", "certificate-authority-data": "bm9uZQ=="}
    path = kubeconfig(tmp_path / "config", clusters=[{"name": "c", "cluster": cluster}])
    with pytest.raises(ClusterError, match="context one: its certificates cannot be used"):
        await Connection.open(Cluster(path))


async def test_an_api_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with await Connection.open(Cluster(kubeconfig(tmp_path / "config"))) as connection:
        with pytest.raises(ClusterError, match=r"API server of context one \(http://127\.0\.0\.1:9\) does not answer"):
            await connection.get(JOBS, "x")


def test_paths_are_the_apis() -> None:
    assert JOBS.path("team", "x") == "/apis/inflight.dev/v1alpha1/namespaces/team/rltrainingjobs/x"
    assert JOBS.path("") == "/apis/inflight.dev/v1alpha1/rltrainingjobs"
    assert PODS.path("team", "a/b", "log") == "/api/v1/namespaces/team/pods/a%2Fb/log"
    assert (JOBS.full_name, PODS.full_name) == ("rltrainingjobs.inflight.dev", "pods")
