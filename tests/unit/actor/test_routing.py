"""Choice of a server, and the circuit breaker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight_runtime.actor.routing import (
    BREAKER_COOLDOWN_S,
    BREAKER_LONGEST_S,
    Breaker,
    Server,
    ServerKey,
    ServerRecord,
    choose,
    explain,
)
from inflight_runtime.types import Version

V0, V1, V2 = Version(1, 0), Version(1, 1), Version(2, 0)


def server(name: str, state: str = "READY", version: Version | None = V1, capacity: int = 8, boot: str = "b") -> Server:
    return Server(name, boot, f"http://{name}", state, version, capacity)  # type: ignore[arg-type]


class Table:
    """Records by key, with loads and breakers that a row of a test sets."""

    def __init__(self, loads: dict[str, int] | None = None, opened: tuple[str, ...] = ()) -> None:
        self.records: dict[ServerKey, ServerRecord] = {}
        for name, load in (loads or {}).items():
            self(ServerKey(name, "b")).in_flight = load
        for name in opened:
            self(ServerKey(name, "b")).breaker.open_until = 100.0

    def __call__(self, key: ServerKey) -> ServerRecord:
        return self.records.setdefault(key, ServerRecord())


ROWS = [
    ("no server at all", [], {}, {}, None),
    ("the least loaded", [server("a"), server("b")], {"loads": {"a": 4, "b": 2}}, {}, "b"),
    (
        "load counts by capacity",
        [server("a", capacity=32), server("b", capacity=4)],
        {"loads": {"a": 8, "b": 2}},
        {},
        "a",
    ),
    ("UPDATING serves as well", [server("a", state="UPDATING")], {}, {}, "a"),
    ("JOINING does not", [server("a", state="JOINING"), server("b")], {"loads": {"b": 8}}, {}, "b"),
    ("SYNCING does not", [server("a", state="SYNCING")], {}, {}, None),
    ("EVICTED does not", [server("a", state="EVICTED")], {}, {}, None),
    ("nor does one without a version", [server("a", version=None)], {}, {}, None),
    ("an old version is passed over", [server("a", version=V0), server("b")], {}, {"min_version": V1}, "b"),
    ("a later epoch is a later version", [server("a", version=V1)], {}, {"min_version": V2}, None),
    ("affinity goes before load", [server("a"), server("b")], {"loads": {"a": 7}}, {"affinity": "a"}, "a"),
    (
        "but not to a server that is gone",
        [server("a", state="EVICTED"), server("b")],
        {},
        {"affinity": "a"},
        "b",
    ),
    ("nor to one that failed this request", [server("a"), server("b")], {}, {"affinity": "a", "avoid": "a"}, "b"),
    ("the one that failed, if it is the only one", [server("a")], {}, {"avoid": "a"}, "a"),
    (
        "an open circuit lets nothing through",
        [server("a"), server("b")],
        {"loads": {"b": 8}, "opened": ("a",)},
        {},
        "b",
    ),
    ("all circuits open", [server("a")], {"opened": ("a",)}, {}, None),
    ("until the cool-down is over", [server("a")], {"opened": ("a",)}, {"now": 100.0}, "a"),
]


@pytest.mark.parametrize(("servers", "table", "call", "expected"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_choice_of_a_server(servers, table, call, expected):
    options = {"min_version": Version(0, 0)} | call
    if "affinity" in options:
        options["affinity"] = ServerKey(options["affinity"], "b")
    options["avoid"] = {ServerKey(options["avoid"], "b")} if "avoid" in options else set()
    chosen = choose(servers, Table(**table), **options)
    assert (chosen.server_id if chosen else None) == expected


def test_a_restarted_server_has_a_clean_record():
    table = Table(opened=("a",))
    chosen = choose([server("a", boot="after the restart")], table, min_version=V0)
    assert chosen is not None


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.integers(1, 200))
def test_load_spreads_by_capacity(capacities, requests):
    servers = [server(f"s{index}", capacity=capacity) for index, capacity in enumerate(capacities)]
    table = Table()
    for number in range(requests):
        chosen = choose(servers, table, min_version=V0)
        assert chosen is not None
        record = table(chosen.key)
        record.in_flight += 1
        record.last_pick = number + 1
    fullness = [table(one.key).in_flight / one.capacity for one in servers]
    assert max(fullness) - min(fullness) <= 1.0 + 1e-9


def test_the_circuit_opens_after_failures_in_a_row_and_one_probe_closes_it():
    breaker = Breaker()
    breaker.begin()
    breaker.failure(0.0)
    assert breaker.allows(0.0)
    breaker.success()
    breaker.failure(1.0)
    assert breaker.allows(1.0)  # not in a row
    breaker.failure(1.0)
    assert not breaker.allows(1.0)
    assert not breaker.allows(1.0 + BREAKER_COOLDOWN_S - 0.01)
    after = 1.0 + BREAKER_COOLDOWN_S
    assert breaker.allows(after)
    breaker.begin()
    assert not breaker.allows(after)  # one probe at a time
    breaker.success()
    assert breaker.allows(after)


def test_each_failed_probe_doubles_the_cool_down_up_to_a_bound():
    breaker = Breaker()
    breaker.failure(0.0)
    breaker.failure(0.0)
    now, cooldowns = 0.0, []
    for _ in range(8):
        assert breaker.open_until is not None
        cooldowns.append(breaker.open_until - now)
        now = breaker.open_until
        breaker.begin()
        breaker.failure(now)
    assert cooldowns[:3] == [BREAKER_COOLDOWN_S, 2 * BREAKER_COOLDOWN_S, 4 * BREAKER_COOLDOWN_S]
    assert max(cooldowns) == BREAKER_LONGEST_S


def test_requests_that_were_under_way_do_not_prolong_an_open_circuit():
    breaker = Breaker()
    breaker.failure(0.0)
    breaker.failure(0.0)
    until = breaker.open_until
    breaker.failure(0.5)
    assert breaker.open_until == until


def test_a_probe_without_a_verdict_lets_the_next_one_through():
    breaker = Breaker()
    breaker.failure(0.0)
    breaker.failure(0.0)
    breaker.begin()
    breaker.withdrawn()
    assert breaker.allows(BREAKER_COOLDOWN_S)


def test_the_reasons_why_no_server_can_be_chosen_are_named():
    table = Table(opened=("d",))
    servers = [
        Server("a", "b", "", "EVICTED", V1, 1, "no heartbeat"),
        server("b", state="SYNCING"),
        server("c", version=V0),
        server("d"),
    ]
    text = explain(servers, table.records, V1)
    assert "a: EVICTED (no heartbeat)" in text
    assert "b: SYNCING" in text
    assert "c: at version 1.0, wanted 1.1 or later" in text
    assert "d: circuit open" in text
    assert explain([], {}, V1) == "no inference server has joined"
