"""The state of a run as a table, and the whole summary of one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from launcher import lease
from launcher.ledger import AttemptEnd, Heartbeat, HostRecord, StopRequest
from launcher.rundir import RunDir
from launcher.summary import SHOWN_HOSTS, FailureRow, RunState, plain, run_state, summary
from launcher.supervise.records import Order, Provision
from recipes.contract import Phase, Progress, RunPath
from tests.unit.rundir_support import commit_checkpoint, make_recipe, make_run
from tests.unit.test_cost import LOST, NOW, ZONE, provision

STOP = StopRequest(requested_s=1.0, by="me")


def make_end(exit_code: int) -> AttemptEnd:
    return AttemptEnd(
        end_s=9.0,
        exit_code=exit_code,
        first_failing_host="s1-h0" if exit_code not in (0, 42) else None,
        message="out of memory",
        hint="lower the batch",
        from_step=-1,
        to_step=5,
    )


def beat(
    run: RunDir, host: str, *, attempt: int, step: int, time_s: float, loss: float | None = None
) -> None:
    metrics = {} if loss is None else {"train/loss": loss, "perf/step_time_s": 0.5}
    progress = Progress(
        phase=Phase.TRAINING, step=step, num_steps=20, committed_step=-1, time_s=time_s, metrics=metrics
    )
    run.write_heartbeat(Heartbeat(host=host, attempt=attempt, progress=progress))


@pytest.mark.parametrize(
    ("held", "attempts", "exit_code", "stop", "state"),
    [
        (False, 0, None, None, RunState.CREATED),
        (True, 0, None, None, RunState.RUNNING),
        (True, 1, None, None, RunState.RUNNING),
        (True, 1, None, STOP, RunState.RUNNING),
        (True, 1, 75, None, RunState.RUNNING),
        (True, 1, 42, None, RunState.RUNNING),
        (True, 1, 0, None, RunState.COMPLETE),
        (False, 1, None, None, RunState.STALE),
        (False, 0, None, STOP, RunState.STOPPED),
        (False, 1, None, STOP, RunState.STOPPED),
        (False, 1, 0, None, RunState.COMPLETE),
        (False, 1, 0, STOP, RunState.COMPLETE),
        (False, 1, 42, None, RunState.PREEMPTED),
        (False, 1, 42, STOP, RunState.STOPPED),
        (False, 1, 75, None, RunState.FAILED),
        (False, 1, 2, STOP, RunState.FAILED),
    ],
)
def test_state(
    held: bool, attempts: int, exit_code: int | None, stop: StopRequest | None, state: RunState
) -> None:
    end = None if exit_code is None else make_end(exit_code)
    assert run_state(held=held, attempts=attempts, end=end, stop=stop) is state


RESUMES = dataclasses.replace(STOP, resumes=True)


@pytest.mark.parametrize(
    ("exit_code", "stop", "provisions", "supervised", "state"),
    [
        (None, None, [provision()], False, RunState.WAITING),
        (None, None, [provision(ready=1)], False, RunState.STARTING),
        (None, None, [LOST], True, RunState.WAITING),
        (None, None, [LOST], False, RunState.STALE),
        (None, STOP, [provision(ready=1)], True, RunState.STOPPED),
        (None, RESUMES, [provision(ready=1)], True, RunState.STARTING),
        (42, RESUMES, [], False, RunState.PREEMPTED),
        (42, None, [LOST], True, RunState.WAITING),
        (42, None, [LOST], False, RunState.PREEMPTED),
        (75, None, [LOST], True, RunState.FAILED),
        (75, None, [LOST, provision(2)], True, RunState.WAITING),
        (0, None, [provision(ready=1)], True, RunState.COMPLETE),
    ],
)
def test_state_of_a_run_that_gets_machines(
    exit_code: int | None,
    stop: StopRequest | None,
    provisions: list[Provision],
    supervised: bool,
    state: RunState,
) -> None:
    end = None if exit_code is None else make_end(exit_code)
    found = run_state(
        held=False, attempts=1, end=end, stop=stop, provisions=provisions, supervised=supervised
    )
    assert found is state


def test_who_supervises_and_what_it_costs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_order(Order(id="o1", recipe="launches/r.yaml", bundle=None, launched_s=NOW, by="me"))
    assert run.claim_provision(provision(ready=3))
    seen = summary(run, NOW)
    assert (seen.supervisor, seen.is_abandoned, seen.cost.spent_usd) == (None, True, 24.0)
    assert plain(seen)["spent_usd"] == 24.0
    assert plain(seen)["place"] == ZONE
    assert summary(run, NOW, overseer="all").supervisor == "all"
    run.acquire(lease.this_process("muster supervise tiny"), NOW, RunPath.SUPERVISOR)
    seen = summary(run, NOW, overseer="all")
    assert seen.is_abandoned is False
    assert seen.supervisor is not None
    assert "muster supervise tiny" in seen.supervisor


def test_a_local_run_needs_no_supervisor(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path), NOW, overseer="all")
    assert (seen.supervisor, seen.is_abandoned, seen.cost.spent_usd) == (None, False, None)


def test_a_running_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.acquire(lease.this_process("muster launch"), 100.0)
    attempt = run.next_attempt(100.0, recipe=make_recipe(), hosts=["s0-h0", "s1-h0"])
    run.write_host(attempt, HostRecord(host="s0-h0", hostname="vm", pid=7, start_s=100.0))
    commit_checkpoint(run.storage, 5)
    beat(run, "s0-h0", attempt=attempt, step=7, time_s=109.0, loss=2.5)
    beat(run, "s1-h0", attempt=attempt, step=6, time_s=108.0)
    beat(run, "s2-h0", attempt=attempt - 1, step=19, time_s=1.0, loss=9.0)
    seen = summary(run, 110.0)
    assert (seen.name, seen.state, seen.step, seen.num_steps, seen.committed_step) == (
        "tiny",
        RunState.RUNNING,
        7,
        20,
        5,
    )
    assert (seen.loss, seen.step_time_s, seen.eval_loss, seen.tokens_per_s) == (2.5, 0.5, None, None)
    assert [(host.host, host.pid, host.step, host.age_s) for host in seen.hosts] == [
        ("s0-h0", 7, 7, 1.0),
        ("s1-h0", None, 6, 2.0),
    ]
    assert seen.updated_s == 109.0
    assert seen.failure is None
    assert seen.holder is not None
    assert seen.logs == f"{run.url}/attempts/0001/logs"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0", "s1-h0"])
    run.write_attempt_end(attempt, make_end(2))
    seen = summary(run, 110.0)
    assert seen.state is RunState.FAILED
    assert seen.failure == FailureRow(host="s1-h0", message="out of memory", hint="lower the batch")


def test_without_an_end_the_host_that_is_not_collateral_is_blamed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0", "s1-h0"])
    lost = HostRecord(
        host="s0-h0", hostname="vm", pid=7, start_s=1.0, end_s=2.0, exit_code=75, collateral=True
    )
    run.write_host(attempt, lost)
    killed = dataclasses.replace(lost, host="s1-h0", end_s=3.0, collateral=False, reason="killed")
    run.write_host(attempt, killed)
    seen = summary(run, 110.0)
    assert seen.state is RunState.STALE
    assert seen.failure == FailureRow(host="s1-h0", message="killed", hint="")


def test_of_many_hosts_those_that_matter_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0"])
    run.write_attempt_end(1, make_end(75))
    matter = {"s0-h0", "s1-h0", *(f"s3-h{index}" for index in range(SHOWN_HOSTS - 2))}
    for host in [f"s{slice_id}-h{index}" for slice_id in range(4) for index in range(32)]:
        beat(run, host, attempt=1, step=3, time_s=8.0)
        path = tmp_path / "tiny" / "heartbeat" / f"{host}.json"
        if host not in matter:
            # Whoever reads this one notes the damage.
            path.write_text("{")
        is_silent = host in matter and host.startswith("s3")
        os.utime(path, (1000.0, 1000.0) if is_silent else (2000.0, 2000.0))
    found = summary(run, 10.0)
    assert ({row.host for row in found.hosts}, found.num_hosts, list(found.damaged)) == (matter, 128, [])
    assert found.step == 3
    everything = summary(run, 10.0, all_hosts=True)
    assert (len(everything.hosts), len(everything.damaged)) == (SHOWN_HOSTS, 128 - SHOWN_HOSTS)
