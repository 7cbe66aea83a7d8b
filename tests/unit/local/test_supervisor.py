"""The supervisor, with small scripts as roles."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from inflight_runtime.local.supervisor import RoleFailedError, RoleSpec, Supervisor

DEADLINE_S = 30.0


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {DEADLINE_S} s"
        await asyncio.sleep(0.01)


def script(path: Path, body: str) -> list[str]:
    path.write_text(textwrap.dedent(body))
    return [sys.executable, "-S", str(path)]


class Stage:
    """A supervisor, a directory for scripts and logs, and the events that were told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[str] = []
        self.supervisor = Supervisor(on_event=self.events.append)

    def role(self, name: str, body: str, **options: Any) -> RoleSpec:
        command = script(self.directory / f"{name}.py", body)
        options.setdefault("kind", "actor")
        return RoleSpec(
            name=name,
            command=lambda: command,
            log=self.directory / f"{name}.log",
            environment=dict(os.environ),
            **options,
        )

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def pid(self, name: str) -> int:
        pid = next(status.pid for status in self.supervisor.status() if status.name == name)
        assert pid is not None
        return pid


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    try:
        yield made
    finally:
        await made.supervisor.aclose()


def file_ready(path: Path) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return await asyncio.to_thread(path.exists)

    return probe


SLEEP = """
    import time
    print("up", flush=True)
    time.sleep(600)
"""


async def test_a_role_that_completes_is_not_started_again(stage: Stage) -> None:
    stage.supervisor.start(stage.role("trainer", "print('trained')", kind="trainer", completes=True))
    await stage.supervisor.wait_gone("trainer")
    [status] = stage.supervisor.status()
    assert (status.phase, status.restarts) == ("done", 0)
    assert "trained" in stage.log("trainer")


async def test_a_role_that_should_not_end_is_started_again_even_after_exit_code_zero(stage: Stage) -> None:
    marker = stage.directory / "second"
    body = f"""
        import pathlib, sys, time
        marker = pathlib.Path({str(marker)!r})
        if not marker.exists():
            marker.touch()
            sys.exit(0)
        print("second life", flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("server", body, kind="inference"))
    await until(lambda: "second life" in stage.log("server"))
    assert stage.supervisor.status()[0].restarts == 1


async def test_a_crash_loop_ends_after_the_bound_with_the_last_lines_of_the_log(stage: Stage) -> None:
    body = """
        import sys
        print("loading")
        print("ValueError: the real cause", file=sys.stderr)
        for number in range(40):
            print("noise", number)
        sys.exit(3)
    """
    stage.supervisor.start(stage.role("server", body, restarts=2, startup_restarts=2, kind="inference"))
    with pytest.raises(RoleFailedError) as caught:
        await stage.supervisor.wait_gone("server")
    message = str(caught.value)
    assert message.startswith("server: ended with exit code 3 (after 2 restarts)")
    assert "noise 39" in message
    assert "first error in it: ValueError: the real cause" in message
    assert "| loading" not in message
    assert stage.log("server").count("--- server: start") == 3


async def test_what_never_gets_ready_is_given_up_sooner_than_what_once_was(stage: Stage) -> None:
    never = stage.role(
        "server", "import sys; sys.exit(1)", kind="inference", restarts=5, ready=file_ready(stage.directory / "never")
    )
    stage.supervisor.start(never)
    with pytest.raises(RoleFailedError, match=r"exit code 1 before it was ready \(after 1 restart\)"):
        await stage.supervisor.wait_ready("server")


async def test_a_role_that_is_not_ready_in_time_is_killed_and_fails_with_its_log(stage: Stage) -> None:
    never = stage.directory / "never"
    spec = stage.role("server", SLEEP, kind="inference", ready=file_ready(never), ready_within_s=1.5)
    stage.supervisor.start(spec)
    await until(lambda: "up" in stage.log("server"))
    pid = stage.pid("server")
    with pytest.raises(RoleFailedError, match=r"(?s)not ready within 1.5 s.*\| up"):
        await stage.supervisor.wait_ready("server")
    await until(lambda: not psutil.pid_exists(pid))


async def test_exit_code_two_means_bad_input_and_is_not_tried_again(stage: Stage) -> None:
    stage.supervisor.start(stage.role("actor", "import sys; print('no such field'); sys.exit(2)", completes=True))
    with pytest.raises(RoleFailedError, match=r"(?s)exit code 2.*no such field"):
        await stage.supervisor.wait_gone("actor")
    assert stage.log("actor").count("--- actor: start") == 1


async def test_waiting_for_one_role_ends_when_another_fails(stage: Stage) -> None:
    stage.supervisor.start(stage.role("trainer", SLEEP, kind="trainer", completes=True))
    stage.supervisor.start(stage.role("actor", "import sys; sys.exit(2)"))
    with pytest.raises(RoleFailedError, match=r"^actor: "):
        await stage.supervisor.wait_gone("trainer")


async def test_a_killed_role_comes_back_with_a_fresh_command(stage: Stage) -> None:
    path = stage.directory / "count.py"
    calls = 0

    def command() -> list[str]:
        nonlocal calls
        calls += 1
        return script(path, f"import time; print('life {calls}', flush=True); time.sleep(600)")

    log = stage.directory / "server.log"
    stage.supervisor.start(RoleSpec("server", "inference", command, log, dict(os.environ)))
    await until(lambda: "life 1" in stage.log("server"))
    os.kill(stage.pid("server"), signal.SIGKILL)
    await until(lambda: "life 2" in stage.log("server"))
    assert any("was ended by SIGKILL; restart 1 of 5" in event for event in stage.events)


async def test_stop_gives_a_role_time_to_end_in_order(stage: Stage) -> None:
    body = """
        import signal, sys, time
        def leave(*_):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(143)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("trainer", body, kind="trainer", completes=True))
    await until(lambda: "up" in stage.log("trainer"))
    await stage.supervisor.stop("trainer")
    assert stage.log("trainer").endswith("saved\n")
    [status] = stage.supervisor.status()
    assert (status.phase, status.restarts, status.pid) == ("done", 0, None)


async def test_stop_kills_what_ignores_sigterm_together_with_its_children(stage: Stage) -> None:
    body = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        # As torchrun starts its ranks: in a session of their own.
        away = subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True)
        near = subprocess.Popen([sys.executable, "-S", "-c", child])
        print(f"children {away.pid} {near.pid}.", flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("server", body, kind="inference", grace_s=0.5))
    await until(lambda: re.search(r"children \d+ \d+\.", stage.log("server")))
    pids = [stage.pid("server"), *map(int, re.findall(r"children (\d+) (\d+)\.", stage.log("server"))[0])]
    assert all(psutil.pid_exists(pid) for pid in pids)
    await stage.supervisor.stop("inference")
    await until(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}")


@pytest.mark.parametrize("apart", ["start_new_session=True", "process_group=0"])
async def test_children_that_a_dead_role_leaves_behind_are_ended_before_it_is_started_again(
    stage: Stage, apart: str
) -> None:
    body = f"""
        import subprocess, sys, time
        child = "import time; time.sleep(600)"
        away = subprocess.Popen([sys.executable, "-S", "-c", child], {apart})
        print(f"child {{away.pid}}.", flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("trainer", body, kind="trainer", completes=True))
    await until(lambda: re.search(r"child \d+\.", stage.log("trainer")))
    [orphan] = map(int, re.findall(r"child (\d+)\.", stage.log("trainer")))
    os.kill(stage.pid("trainer"), signal.SIGKILL)
    await until(lambda: len(re.findall(r"child \d+\.", stage.log("trainer"))) == 2)
    assert not is_running(orphan)


async def test_roles_are_groups_of_one_session_so_that_they_are_scheduled_alike(stage: Stage) -> None:
    for name in ("one", "other"):
        stage.supervisor.start(stage.role(name, "import time; time.sleep(600)", kind="actor"))
    await until(lambda: all(status.pid for status in stage.supervisor.status()))
    pids = [status.pid for status in stage.supervisor.status() if status.pid]
    await until(lambda: [os.getpgid(pid) for pid in pids] == pids)
    assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}


async def test_kill_now_ends_a_stop_that_is_under_way(stage: Stage) -> None:
    body = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("trainer", body, kind="trainer", grace_s=600.0))
    await until(lambda: "up" in stage.log("trainer"))
    stopping = asyncio.create_task(stage.supervisor.stop("trainer"))
    await until(lambda: stage.supervisor.status()[0].phase == "stopping")
    stage.supervisor.kill_now()
    await asyncio.wait_for(stopping, DEADLINE_S)


async def test_what_a_role_leaves_in_its_temporary_directory_goes_with_the_run(stage: Stage) -> None:
    body = """
        import tempfile, time
        print(tempfile.mkdtemp(), flush=True)
        time.sleep(600)
    """
    stage.supervisor.start(stage.role("inference", body, kind="inference"))
    await until(lambda: stage.log("inference").count("\n") == 2)
    left = Path(stage.log("inference").splitlines()[-1])
    assert await asyncio.to_thread(left.is_dir)
    await stage.supervisor.aclose()
    assert not await asyncio.to_thread(left.parent.exists)


async def test_a_guardian_that_was_killed_is_replaced(stage: Stage) -> None:
    guardian = stage.supervisor._guardian.pid
    os.kill(guardian, signal.SIGKILL)
    await until(lambda: psutil.Process(guardian).status() == psutil.STATUS_ZOMBIE)
    stage.supervisor.start(stage.role("actor", SLEEP))
    await until(lambda: "up" in stage.log("actor"))
    await until(lambda: stage.supervisor._guardian.pid != guardian)
    assert is_running(stage.supervisor._guardian.pid)


async def test_a_command_that_does_not_exist_fails_the_run_with_the_reason(stage: Stage) -> None:
    log = stage.directory / "actor.log"
    stage.supervisor.start(RoleSpec("actor", "actor", lambda: ["/no/such/program"], log, {}))
    with pytest.raises(RoleFailedError, match=r"cannot be run.*No such file"):
        await stage.supervisor.wait_ready("actor")


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
