from __future__ import annotations

from inflight_runtime.coordinator.leases import LeaseClock


def test_a_lease_lasts_its_ttl_from_its_last_renewal() -> None:
    clock = LeaseClock(10.0)
    clock.hold(1, 1, "a", 0.0)
    assert clock.overdue(10.0) == []
    assert clock.renew(1, 1, "a", 9.0)
    assert clock.overdue(19.0) == []
    assert clock.overdue(19.1) == [(1, 1)]


def test_only_the_holder_of_the_current_fence_can_renew() -> None:
    clock = LeaseClock(10.0)
    clock.hold(1, 2, "a", 0.0)
    assert not clock.renew(1, 1, "a", 1.0)
    assert not clock.renew(1, 2, "b", 1.0)
    assert not clock.renew(9, 1, "a", 1.0)
    clock.end(1, 1)
    assert clock.renew(1, 2, "a", 1.0)
    clock.end(1, 2)
    assert not clock.renew(1, 2, "a", 1.0)


def test_replacing_keeps_the_terms_of_leases_that_stay() -> None:
    clock = LeaseClock(10.0)
    clock.hold(1, 1, "a", 0.0)
    clock.hold(2, 1, "a", 0.0)
    clock.hold(3, 1, "a", 0.0)
    clock.replace([(1, 1, "a"), (2, 2, "b"), (4, 1, "c")], 5.0)
    assert clock.overdue(10.5) == [(1, 1)]
    assert sorted(clock.overdue(16.0)) == [(1, 1), (2, 2), (4, 1)]
