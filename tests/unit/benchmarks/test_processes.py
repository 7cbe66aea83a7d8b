from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TICK_S, Roles, busy_seconds, parse_busy, parse_pss, parse_stat, process_lines


def test_stat_is_read_whatever_the_command_is_called() -> None:
    fields = ["S", "7", "9", "9", "0", "-1", "0", "0", "0", "0", "0", "100", "20", "3", "1", "20", "0"]
    line = parse_stat(f"42 (a) b (c) {' '.join(fields)}")
    assert (line.pid, line.parent, line.group) == (42, 7, 9)
    assert line.cpu_s == pytest.approx(124 * TICK_S)


def test_memory_is_the_proportional_part() -> None:
    assert parse_pss("00400000-7ff [rollup]\nRss:      900 kB\nPss:      250 kB\nPss_Dirty:  1 kB\n") == 256_000
    with pytest.raises(ValueError, match="Pss"):
        parse_pss("Rss: 900 kB\n")


def test_a_machine_that_idles_or_waits_is_not_busy() -> None:
    assert parse_busy("cpu  100 10 50 99999 777 3 2 55 0 0\n") == pytest.approx(165 * TICK_S)


def test_this_process_is_on_the_list_and_the_machine_has_worked() -> None:
    mine = next(line for line in process_lines() if line.pid == os.getpid())
    assert mine.parent == os.getppid()
    assert mine.group == os.getpgrp()
    assert busy_seconds() > 0


def test_roles_are_found_by_the_config_they_were_started_with(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    configs = {name: tmp_path / "config" / f"{name}.json" for name in ("actor-0", "inference-0", "trainer")}
    for path in configs.values():
        path.write_text("{}")
    # Time is told in hundredths of a second.
    work = "while time.process_time() < 0.05: pass"
    code = f"import sys, time\n{work}\nprint(flush=True); sys.stdin.read()"
    plain = os.environ | {"INFLIGHT_INFERENCE_CONFIG": ""}
    starts = [  # as an actor, as a server that has become vLLM, and one that is no role of this run
        ([sys.executable, "-c", code, "--config", str(configs["actor-0"])], plain),
        ([sys.executable, "-c", code], plain | {"INFLIGHT_INFERENCE_CONFIG": str(configs["inference-0"])}),
        ([sys.executable, "-c", code, "--config", "/elsewhere/config/trainer.json"], plain),
    ]
    children = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        for command, env in starts
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it runs
        roles = Roles.of(os.getpid(), tmp_path)
        assert roles.groups == {"executor": os.getpid(), "actor-0": children[0].pid, "inference-0": children[1].pid}
        roles.sample_memory()
        assert 1_000_000 < roles.peak_pss["actor-0"] < 200_000_000
        assert roles.cpu_seconds()["inference-0"] > 0
    finally:
        for child in children:
            child.communicate()


def test_the_peak_is_kept_when_a_role_shrinks_or_ends(tmp_path: Path) -> None:
    roles = Roles({"gone": 2**22 - 1}, {"gone": 5})
    roles.sample_memory()
    assert roles.peak_pss == {"gone": 5}
