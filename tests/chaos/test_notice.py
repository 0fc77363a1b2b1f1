"""Notices, lost peers and losses that are not finite: how a real run of two processes ends, and how soon."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.orphans import HostProcesses
from launcher.processes import is_running
from recipes.contract import ExitCode
from tests.chaos.training import Lab, Training, cut_at, identities, is_finite, look_at, read_arrays
from tests.local.launching import none_running, trainer_pid

pytestmark = pytest.mark.timeout(900)

NOTICE_LIMIT_S = 25.0
PEER_LIMIT_S = 15.0


@pytest.mark.parametrize(("victim", "rank"), [("agent", 1), ("trainer", 0)])
def test_notice_while_training(lab: Lab, tmp_path: Path, victim: str, rank: int) -> None:
    with Training(lab, tmp_path, step_s=0.2, options=["--no-restart"]) as training:
        training.wait_until_begun(7)
        _notice(training, victim, rank)
        _check_stopped(training)
        # By themselves, after the same step, and that step is saved.
        assert [record.status for record in training.records()] == [ExitCode.PREEMPTED] * 2
        assert training.begun_by_host() == [_committed(training)] * 2, "a step was lost"
        assert _committed(training) >= 7


def test_notice_while_compiling(lab: Lab, tmp_path: Path) -> None:
    cold = dataclasses.replace(lab, programs=tmp_path / "programs")
    with Training(cold, tmp_path / "run", step_s=0.2, options=["--no-restart"]) as training:
        training.wait_for(lambda: training.phases() == ["compiling"] * 2, "compilation")
        _notice(training, "agent", 1, phase="compiling")
        _check_stopped(training)
        assert _committed(training) in (-1, training.begun())


@pytest.mark.parametrize(("victim", "rank"), [("agent", 0), ("trainer", 1)])
def test_notice_while_restoring(lab: Lab, finished: Path, tmp_path: Path, victim: str, rank: int) -> None:
    cut_at(finished, tmp_path, 20)
    options = ["--no-restart"]
    with Training(lab, tmp_path, step_s=0.2, hold="restoring", options=options) as training:
        training.wait_for(lambda: training.phases() == ["restoring"] * 2, "restoring")
        training.release()
        _notice(training, victim, rank, phase="restoring")
        _check_stopped(training)
        # Either it was ended before its first step, or it stopped by itself after the first ones.
        assert _committed(training) == max(20, training.begun())


@pytest.mark.parametrize(("victim", "rank"), [("agent", 1), ("trainer", 0)])
def test_notice_while_importing(lab: Lab, tmp_path: Path, victim: str, rank: int) -> None:
    """Nothing can be saved yet; the other process must not wait for ever for its peer."""
    with Training(lab, tmp_path, options=["--no-restart"]) as training:
        training.wait_for_trainers()
        _notice(training, victim, rank)
        assert training.phases() == []
        _check_stopped(training)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_peer_is_noticed(lab: Lab, tmp_path: Path, rank: int) -> None:
    """Also where nobody tells the survivor, as between two machines: the launcher is stopped meanwhile."""
    with Training(lab, tmp_path, step_s=0.2, options=["--no-restart"]) as training:
        training.wait_until_begun(7)
        hosts = training.processes()
        survivor = hosts[1 - rank].trainer
        assert survivor is not None
        training.process.send_signal(signal.SIGSTOP)
        os.kill(trainer_pid(hosts[rank]), signal.SIGKILL)
        killed_s = time.monotonic()
        while is_running(survivor) and time.monotonic() < killed_s + 4 * PEER_LIMIT_S:
            time.sleep(0.05)
        took_s = time.monotonic() - killed_s
        training.process.send_signal(signal.SIGCONT)
        code, _, err = training.finish()
        assert took_s <= PEER_LIMIT_S
        assert (code, training.codes()) == (ExitCode.INFRASTRUCTURE, [ExitCode.INFRASTRUCTURE]), err
        end = training.run.attempt_end(1)
        assert end is not None
        assert end.first_failing_host == f"s{rank}-h0"
        assert "SIGKILL" in end.message
        lost, left = training.records()[rank], training.records()[1 - rank]
        assert (lost.status, lost.exit_code, lost.collateral) == (137, ExitCode.INFRASTRUCTURE, False)
        # Aborted by the coordination service, or by an error from the collective: whichever comes first.
        assert left.status in (134, ExitCode.INFRASTRUCTURE)
        assert (left.exit_code, left.collateral) == (ExitCode.INFRASTRUCTURE, True)


def test_a_loss_that_is_not_finite_ends_the_run(lab: Lab, tmp_path: Path) -> None:
    changes = {
        "optimizer.learning_rate": 1e30,
        "optimizer.warmup_steps": 4,
        "checkpoint.save_interval_steps": 1,
    }
    with Training(lab, tmp_path, changes=changes) as training:
        code, _, err = training.finish()
        assert (code, training.codes()) == (ExitCode.EXPERIMENT_FAILED, [ExitCode.EXPERIMENT_FAILED]), err
        assert err.count("error:") == 1
        assert "is nan" in err or "is inf" in err
        assert "hint: the newest checkpoint is from before" in err
        assert "Traceback" not in err
        saved = training.run_path / "checkpoints"
        steps = [int(path.name) for path in saved.iterdir() if (path / "commit_success.txt").exists()]
        assert steps
        assert all(is_finite(read_arrays(training.checkpoint(step))) for step in steps), steps
        assert max(look_at(tmp_path).losses) == max(steps), "the bad step was recorded or saved"


def _notice(training: Training, victim: str, rank: int, *, phase: str = "") -> None:
    """SIGTERM to one of four processes, while both trainers are in ``phase``."""
    host = training.processes()[rank]
    training.noticed_s = time.monotonic()
    os.kill(host.agent.pid if victim == "agent" else trainer_pid(host), signal.SIGTERM)
    if phase:
        assert training.phases() == [phase] * 2, "the notice came too late for what is tested here"


def _check_stopped(training: Training) -> None:
    """Both processes stopped as after a notice, in time."""
    hosts: Sequence[HostProcesses] = training.processes()
    while any(map(is_running, identities(hosts))) and time.monotonic() < training.noticed_s + 120:
        time.sleep(0.02)
    took_s = time.monotonic() - training.noticed_s
    code, _, err = training.finish()
    assert none_running(hosts)
    records = training.records()
    assert len(records) == 2, (records, err)
    # Who was not noticed may find its peer gone first, and says so.
    own = [record for record in records if not (record.exit_code == 75 and record.collateral)]
    assert own, (records, err)
    assert {record.exit_code for record in own} == {ExitCode.PREEMPTED}, (records, err)
    assert (code, training.codes()) == (ExitCode.PREEMPTED, [ExitCode.PREEMPTED]), err
    assert took_s < NOTICE_LIMIT_S, records


def _committed(training: Training) -> int:
    end = training.run.attempt_end(1)
    assert end is not None
    return end.to_step
