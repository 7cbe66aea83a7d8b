from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.coordinator.membership import Membership, MemberStateError, StaleMemberError
from inflight_runtime.protocol import MemberBeat, MemberState, VersionField
from inflight_runtime.types import Version

POLICY = Version(2, 5)


def beat(server: str = "s0", boot: str = "b0", *, version: tuple[int, int] | None = None, **changes: Any) -> MemberBeat:
    values: dict[str, Any] = {"url": "http://s0", "engine": "vllm", "capacity": 16, "max_length": 128} | changes
    field = None if version is None else VersionField(epoch=version[0], step=version[1])
    return MemberBeat(server_id=server, boot_id=boot, version=field, **values)


def told(state: str, *, epoch: int = 2, boot: str = "b0", version: tuple[int, int] | None = None, **more: Any) -> Any:
    field = None if version is None else VersionField(epoch=version[0], step=version[1])
    return MemberState(epoch=epoch, boot_id=boot, state=state, version=field, **more)  # type: ignore[arg-type]


def state_of(members: Membership, server: str = "s0") -> tuple[str, Version | None]:
    found = {member.server_id: member for member in members.members(0.0)}[server]
    version = None if found.version is None else Version(found.version.epoch, found.version.step)
    return found.state, version


@pytest.fixture
def members() -> Membership:
    found = Membership(ttl_s=10.0)
    found.beat(beat(), 0.0, POLICY)
    return found


def ready(members: Membership, version: tuple[int, int] = (2, 5)) -> None:
    members.set_state("s0", told("READY", version=version), 2, 0.0)


def test_a_server_joins_is_synced_and_gets_ready(members: Membership) -> None:
    assert state_of(members) == ("JOINING", None)
    assert members.beat(beat(), 1.0, POLICY).known
    members.set_state("s0", told("SYNCING"), 2, 1.0)
    assert state_of(members) == ("SYNCING", None)
    assert members.capacities() == []
    ready(members)
    assert state_of(members) == ("READY", Version(2, 5))
    assert members.capacities() == [16]
    members.set_state("s0", told("UPDATING"), 2, 1.0)
    assert state_of(members) == ("UPDATING", Version(2, 5))
    assert members.capacities() == [16]
    assert members.newest_version() == Version(2, 5)


@pytest.mark.parametrize(
    ("version", "state"),
    [((2, 5), "READY"), ((1, 3), "READY"), ((2, 6), "JOINING"), ((3, 0), "JOINING"), ((1, 9), "JOINING")],
)
def test_after_a_coordinator_restart_a_server_is_ready_if_its_version_was_published(
    version: tuple[int, int], state: str
) -> None:
    members = Membership(10.0)
    reply = members.beat(beat(version=version), 0.0, POLICY)
    assert (reply.known, reply.state) == (False, state)
    assert state_of(members)[0] == state


def test_a_restarted_server_starts_over_without_a_version(members: Membership) -> None:
    ready(members)
    reply = members.beat(beat(boot="b1", version=(2, 5)), 1.0, POLICY)
    assert (reply.known, reply.state) == (False, "JOINING")
    assert state_of(members) == ("JOINING", None)
    with pytest.raises(StaleMemberError, match="has restarted: boot id b1 is current"):
        members.set_state("s0", told("READY", version=(2, 5)), 2, 1.0)


def test_a_silent_server_is_evicted_and_joins_again_with_its_next_beat(members: Membership) -> None:
    ready(members)
    assert members.expire(10.0) == []
    assert members.expire(10.1) == ["s0"]
    assert members.expire(20.0) == []
    assert members.members(0.0)[0].reason == "heartbeat lost"
    assert members.beat(beat(version=(2, 5)), 21.0, POLICY).state == "JOINING"


def test_a_broken_server_stays_out_until_it_restarts(members: Membership) -> None:
    ready(members)
    assert members.beat(beat(broken="digest differs"), 1.0, POLICY).state == "EVICTED"
    assert members.members(0.0)[0].reason == "digest differs"
    with pytest.raises(StaleMemberError, match="says it is broken"):
        ready(members)
    assert members.beat(beat(broken="digest differs"), 30.0, POLICY).state == "EVICTED"
    assert members.beat(beat(boot="b1"), 31.0, POLICY).state == "JOINING"


def test_what_the_publisher_evicts_stays_out_for_a_while(members: Membership) -> None:
    ready(members)
    members.set_state("s0", told("EVICTED", reason="missed its deadline"), 2, 5.0)
    assert members.beat(beat(version=(2, 5)), 6.0, POLICY).state == "EVICTED"
    assert members.members(0.0)[0].reason == "missed its deadline"
    assert members.beat(beat(version=(2, 5)), 15.0, POLICY).state == "JOINING"


def test_stale_epochs_strangers_and_nonsense_are_refused(members: Membership) -> None:
    with pytest.raises(StaleMemberError, match="epoch 1 is not current, 2 is"):
        members.set_state("s0", told("READY", epoch=1, version=(1, 5)), 2, 0.0)
    with pytest.raises(StaleMemberError, match="s9 is not a member"):
        members.set_state("s9", told("EVICTED"), 2, 0.0)
    with pytest.raises(MemberStateError, match="needs a version"):
        members.set_state("s0", told("READY"), 2, 0.0)
    assert state_of(members) == ("JOINING", None)


def test_leaving_is_only_for_the_process_that_is_there(members: Membership) -> None:
    members.leave("s0", "another")
    assert len(members.members(0.0)) == 1
    members.leave("s0", "b0")
    members.leave("s0", "b0")
    assert members.members(0.0) == []


def test_the_revision_moves_for_routing_and_for_nothing_else(members: Membership) -> None:
    def moved(action: Any) -> bool:
        before = members.revision
        action()
        assert members.revision >= before
        return members.revision > before

    assert not moved(lambda: members.beat(beat(running=3, waiting=9), 1.0, POLICY))
    assert moved(lambda: ready(members, (2, 4)))
    assert not moved(lambda: ready(members, (2, 4)))
    assert not moved(lambda: members.set_state("s0", told("UPDATING"), 2, 1.0))
    assert moved(lambda: ready(members, (2, 5)))
    assert moved(lambda: members.beat(beat(url="http://elsewhere"), 1.0, POLICY))
    assert moved(lambda: members.beat(beat(server="s1"), 1.0, POLICY))
    assert moved(lambda: members.leave("s1", "b0"))
    assert not moved(lambda: members.leave("s1", "b0"))
    assert moved(lambda: members.expire(100.0))
    assert moved(members.touch)


def test_a_lost_word_of_the_publisher_is_made_up_by_the_servers_own(members: Membership) -> None:
    ready(members, (2, 4))
    members.beat(beat(version=(2, 3)), 1.0, POLICY)
    assert state_of(members) == ("READY", Version(2, 4))
    members.beat(beat(version=(2, 9)), 1.0, POLICY)
    assert state_of(members) == ("READY", Version(2, 4))
    members.beat(beat(version=(2, 5)), 1.0, POLICY)
    assert state_of(members) == ("READY", Version(2, 5))


def test_times_are_kept_for_people(members: Membership) -> None:
    members.set_state("s0", told("READY", version=(2, 5), update_ms=40.0, pause_ms=3.0), 2, 1.0)
    found = members.members(4.5)[0]
    assert (found.last_update_ms, found.last_pause_ms, found.seconds_since_beat) == (40.0, 3.0, 3.5)


_EVENTS = st.one_of(
    st.tuples(
        st.just("beat"),
        st.sampled_from(["b0", "b1"]),
        st.sampled_from([None, (1, 3), (2, 4), (2, 5), (2, 9)]),
        st.sampled_from(["", "", "", "bad"]),
    ),
    st.tuples(
        st.just("tell"),
        st.sampled_from(["b0", "b1"]),
        st.sampled_from(["SYNCING", "READY", "UPDATING", "EVICTED"]),
        st.sampled_from([1, 2]),
    ),
    st.tuples(st.just("expire"), st.just(""), st.just(""), st.just("")),
)


@given(st.lists(st.tuples(st.floats(0, 12), _EVENTS), max_size=30))
def test_whatever_happens_only_told_or_published_servers_are_ready(events: list[Any]) -> None:
    members, now = Membership(10.0), 0.0
    for pause, (kind, boot, what, more) in events:
        now += pause
        before = {member.server_id: member for member in members.members(now)}.get("s0")
        revision = members.revision
        if kind == "beat":
            members.beat(beat(boot=boot, version=what, broken=more), now, POLICY)
        elif kind == "expire":
            members.expire(now)
        else:
            try:
                members.set_state("s0", told(what, epoch=more, boot=boot, version=(2, 5)), 2, now)
            except StaleMemberError:
                assert members.members(now) == ([] if before is None else [before])
                assert before is None or more == 1 or before.boot_id != boot or what != "EVICTED"
        after = {member.server_id: member for member in members.members(now)}.get("s0")
        if after is not None and after.state == "READY":
            assert after.version is not None
            assert (after.version.epoch, after.version.step) <= POLICY
            if before is not None and before.state not in {"READY", "UPDATING"}:
                assert kind == "tell"
        if before is not None and after is not None and before.boot_id != after.boot_id:
            assert after.state in {"JOINING", "EVICTED"}
            assert after.version is None
            assert members.revision > revision
