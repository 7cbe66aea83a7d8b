"""kill -9 of each role in the middle of a run: it completes, the ledger adds up, nothing is trained twice."""

from __future__ import annotations

from pathlib import Path

from support.runs import LocalRun, check_ledger, local_run, sort_letters_job

HERE = Path(__file__).parent
GROUPS = 8


def check_history(run: LocalRun, steps: int) -> None:
    """What survived is one line of steps, with versions that never mix two epochs."""
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == list(range(1, steps + 1))
    epochs = [record["epoch"] for record in metrics]
    assert epochs == sorted(epochs), "a step of an older epoch survived after one of a newer epoch"
    began = {epoch: min(r["step"] for r in metrics if r["epoch"] == epoch) - 1 for epoch in set(epochs)}
    for line in run.rollouts():
        for version in line["versions"]:
            epoch, step = map(int, version.split("."))
            assert step <= line["step"] - 1 or epoch < max(epochs), f"trained on a token of the future: {line}"
            assert epoch not in began or step >= began[epoch], f"{version} is from before its epoch began"


def test_a_run_survives_kill_9_of_every_role_one_after_another(letters_model: Path, tmp_path: Path) -> None:
    steps = 160
    job = sort_letters_job(letters_model, engine="vllm", steps=steps, promptsPerStep=GROUPS, groupSize=8)
    job["spec"]["inference"]["replicas"] = 2
    job["spec"]["checkpoint"] = {"everySteps": 20, "keep": 2}
    job["spec"]["logging"] = {"rolloutsPerStep": 1000}
    switch = tmp_path / "slow"
    slow = {"slow_every": 1, "delay_s": 2.0, "switch": str(switch)}
    job["spec"]["environment"] = {"entrypoint": "slow_letters:SlowLetters", "args": slow}
    (tmp_path / "slow_letters.py").write_text((HERE / "slow_letters.py").read_text())
    with local_run(job, tmp_path) as run:
        ready = run.wait_until(
            "both servers served and 20 steps done",
            lambda state: state.step >= 20 and sum(member.state == "READY" for member in state.members) == 2,
            240,
        )
        first = {member.server_id: member.boot_id for member in ready.members}
        run.kill("inference-0")
        run.wait_for_step(ready.step + 20)  # the other one goes on alone
        run.kill("actor-0")
        run.wait_for_step(run.state().step + 20)
        run.kill("coordinator")
        step = run.wait_until("the coordinator is back", lambda state: state.step > 0).step
        run.wait_for_step(step + 20)
        switch.touch()  # not three steps a second: on a fast machine the run would be over before the server is back
        run.kill("trainer")
        run.wait_until("the trainer was started again", lambda state: state.trainer_starts == 2)
        again = run.wait_until(
            "the killed server serves again, under the new epoch",
            lambda state: any(
                member.server_id == "inference-0"
                and member.boot_id != first["inference-0"]
                and member.version is not None
                and member.version.epoch == 2
                for member in state.members
            ),
            240,
        )
        assert {member.boot_id for member in again.members if member.server_id == "inference-1"} == {
            first["inference-1"]
        }
        switch.unlink()
        run.succeed(300)
        counted = check_ledger(run, steps=steps, groups_per_step=GROUPS)
        assert counted["leased"] == 0
        check_history(run, steps)
        assert {record["epoch"] for record in run.metrics()} == {1, 2}
        for role in ("inference-0", "actor-0", "coordinator", "trainer"):
            assert f"{role}: " in run.printed()
