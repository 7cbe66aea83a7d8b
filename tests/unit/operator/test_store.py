"""The store: whatever comes in, in whatever order, what it knows of an object is the newest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_operator import names
from inflight_operator.store import LAST_APPLIED, MOST_GRAVES, Store, key_of
from inflight_runtime.api import KIND


def child(version: int, name: str = "a-inference", job: str = "a", namespace: str = "team") -> dict[str, Any]:
    labels = {names.JOB_LABEL: job} if job else {}
    metadata = {"namespace": namespace, "name": name, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Service", "metadata": metadata, "spec": {"version": version}}


def job(version: int, name: str = "a") -> dict[str, Any]:
    return {"kind": KIND, "metadata": {"namespace": "team", "name": name, "resourceVersion": str(version)}}


def known(store: Store, key: str = "team/a") -> list[int]:
    return sorted(manifest["spec"]["version"] for manifest in store.children(key).values())


def test_a_child_is_found_under_its_job() -> None:
    store = Store()
    assert store.put("Service", child(5)) == {"team/a"}
    assert store.children("team/a") == {("Service", "a-inference"): child(5)}
    assert store.child("team/a", ("Service", "a-inference")) == child(5)
    assert store.child("team/a", ("Service", "other")) is None
    assert store.children("team/b") == {}


def test_only_news_is_news() -> None:
    store = Store()
    assert store.put("Service", child(5)) == {"team/a"}
    assert store.put("Service", child(5)) == set()
    assert store.put("Service", child(4)) == set()
    assert store.put("Service", child(6)) == {"team/a"}
    assert known(store) == [6]


def test_an_object_that_belongs_to_no_job_is_not_kept() -> None:
    store = Store()
    assert store.put("Service", child(5, job="")) == set()
    assert store.remove("Service", child(6, job="")) == set()
    assert list(store) == []


def test_jobs_are_told_from_their_children() -> None:
    store = Store()
    assert store.put(KIND, job(3)) == {"team/a"}
    assert list(store) == ["team/a"]
    assert len(store) == 1
    assert store.children("team/a") == {}
    found = store.job("team/a")
    assert found is not None and found["metadata"]["resourceVersion"] == "3"
    assert store.remove(KIND, job(4)) == {"team/a"}
    assert store.job("team/a") is None


def test_a_late_answer_does_not_bring_back_what_was_deleted() -> None:
    store = Store()
    store.put("Service", child(5))
    assert store.remove("Service", child(9)) == {"team/a"}
    assert store.put("Service", child(7)) == set()
    assert known(store) == []
    assert store.put("Service", child(10)) == {"team/a"}


def test_a_deletion_that_comes_after_a_new_object_is_old_news() -> None:
    store = Store()
    store.put("Service", child(10))
    assert store.remove("Service", child(9)) == set()
    assert known(store) == [10]


def test_an_object_that_was_deleted_before_it_was_seen_stays_away() -> None:
    store = Store()
    assert store.remove("Service", child(9)) == set()
    assert store.put("Service", child(8)) == set()
    assert known(store) == []


def test_a_label_that_is_changed_by_hand_is_news_to_both_jobs() -> None:
    store = Store()
    store.put("Service", child(5))
    assert store.put("Service", child(6, job="b")) == {"team/a", "team/b"}
    assert (known(store, "team/a"), known(store, "team/b")) == ([], [6])
    assert store.put("Service", child(7, job="")) == {"team/b"}
    assert known(store, "team/b") == []
    assert store.put("Service", child(8)) == {"team/a"}


def test_what_a_list_does_not_have_is_dropped_unless_it_is_newer_than_the_list() -> None:
    store = Store()
    store.put("Service", child(5, "gone"))
    store.put("Service", child(6, "stays"))
    store.put("Service", child(50, "new"))
    store.put("Deployment", child(7, "of-another-kind"))
    lost, newer = store.compare("Service", [child(6, "stays")], "20")
    assert (lost, newer) == ({"team/a"}, [])
    assert known(store) == [6, 7, 50]
    assert store.put("Service", child(19, "gone")) == set()


def test_what_a_list_knows_better_is_named() -> None:
    store = Store()
    store.put("Service", child(5, "one"))
    listed = [child(6, "one"), child(7, "two"), child(8, "nobody's", job="")]
    assert store.compare("Service", listed, "20") == (set(), listed[:2])
    store.remove("Service", child(9, "two"))
    assert store.compare("Service", listed, "20") == (set(), listed[:1])


def test_a_kind_that_has_gone_may_come_again() -> None:
    store = Store()
    store.put(KIND, job(3))
    store.put(KIND, job(4, "b"))
    assert store.drop_all(KIND) == {"team/a", "team/b"}
    assert len(store) == 0
    assert store.put(KIND, job(5)) == {"team/a"}


def test_what_nobody_reads_is_not_kept() -> None:
    store = Store()
    manifest = child(5)
    manifest["metadata"] |= {"managedFields": [{"manager": "x"}], "annotations": {LAST_APPLIED: "{}", "a": "b"}}
    store.put("Service", manifest)
    found = store.child("team/a", ("Service", "a-inference"))
    assert found is not None
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["annotations"] == {"a": "b"}
    assert "managedFields" in manifest["metadata"], "the caller's object is left as it is"


def test_memory_of_what_is_gone_is_bounded() -> None:
    store = Store()
    for number in range(MOST_GRAVES + 10):
        store.remove("Service", child(number + 1, f"gone-{number}"))
    assert len(store._graves) == MOST_GRAVES


@pytest.mark.parametrize(
    ("kind", "manifest", "key"),
    [
        (KIND, job(1), "team/a"),
        ("Service", child(1), "team/a"),
        ("Service", child(1, job=""), ""),
        ("Service", {"metadata": {}}, ""),
    ],
)
def test_the_key_is_the_jobs(kind: str, manifest: dict[str, Any], key: str) -> None:
    assert key_of(kind, manifest) == key


# An object's whole life in the cluster: versions at which it was written (True) or deleted (False).
HISTORY = st.lists(st.booleans(), min_size=1, max_size=12)


@given(history=HISTORY, data=st.data())
def test_any_order_of_news_ends_with_the_newest(history: list[bool], data: st.DataObject) -> None:
    """Watches, answers to writes, readings and lists, each late by as much as it likes."""
    exists: dict[int, bool] = dict.fromkeys([0], False)
    for version, written in enumerate(history, start=1):
        exists[version] = written
    last = len(history)
    news = [("seen", version) for version in exists if version]
    news += [("listed", version) for version in data.draw(st.lists(st.sampled_from(sorted(exists)), max_size=4))]
    news += [("seen", version) for version in data.draw(st.lists(st.sampled_from(range(1, last + 1)), max_size=4))]
    store = Store()
    newest = -1
    for how, version in data.draw(st.permutations(news)):
        if how == "listed":
            alive = [child(version, "x")] if exists[version] else []
            _, newer = store.compare("Service", alive, str(version))
            for manifest in newer:
                store.put("Service", manifest)
        elif exists[version]:
            store.put("Service", child(version, "x"))
        else:
            store.remove("Service", child(version, "x"))
        found = known(store)
        if found:
            assert found[0] >= newest, "an older one over a newer one"
            newest = max(newest, found[0])
    assert known(store) == ([last] if exists[last] else [])
