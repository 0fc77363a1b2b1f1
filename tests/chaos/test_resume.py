"""A run that is killed again and again ends bit for bit where an undisturbed one ends.

Real launcher, agents and trainers, 2 slices x 2 CPU devices, dropout and shuffling on. More cuts, at
moments that only the clock decides: ``pytest -m long tests/chaos/test_resume.py`` (about 15 minutes).
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from recipes.contract import ExitCode
from tests.chaos.training import (
    EVAL_INTERVAL,
    NUM_STEPS,
    SAVE_INTERVAL,
    Lab,
    Training,
    differences,
    digests,
    look_at,
    read_arrays,
)
from tests.local.launching import trainer_pid

pytestmark = pytest.mark.timeout(1800)

STEP_S = 0.1


def test_a_run_that_is_cut_ends_like_one_that_is_not(lab: Lab, finished: Path, tmp_path: Path) -> None:
    chance = random.Random(20)
    with Training(lab, tmp_path, step_s=STEP_S) as training:
        _wait_for_chance(training, chance, 6, 11)
        lost_at = training.begun()
        training.kill_all()
    with Training(lab, tmp_path, step_s=STEP_S) as training:
        training.wait_for_trainers(after=1)
        _check_lost_work(training, 2, lost_at)
        # From here the launcher restarts by itself.
        _wait_for_chance(training, chance, 14, 19, after=1)
        lost_at = training.begun()
        os.kill(trainer_pid(chance.choice(training.processes())), signal.SIGKILL)
        training.wait_for_trainers(after=2)
        _check_lost_work(training, 3, lost_at)
        _wait_for_chance(training, chance, 22, 27, after=2)
        os.kill(chance.choice(training.processes()).agent.pid, signal.SIGTERM)
        training.wait_for(lambda: training.run.attempt_end(3), "end of the third attempt")
        last_begun = training.begun() if training.attempt() == 3 else None
        training.wait_for_trainers(after=3)
        resumed = training.run.attempt_start(4)
        assert resumed is not None
        assert last_begun in (None, resumed.from_step), "steps were lost after a notice"
        _wait_for_chance(training, chance, 31, 37, after=3)
        lost_at = training.begun()
        training.kill_all()
    with Training(lab, tmp_path) as training:
        code, _, err = training.finish()
        assert code == 0, err
        assert training.codes() == [None, ExitCode.INFRASTRUCTURE, ExitCode.PREEMPTED, None, 0]
        _check_lost_work(training, 5, lost_at)
    _check_same_end(finished, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_five_cuts_at_any_moment(lab: Lab, finished: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(5):
        with Training(lab, tmp_path, changes={"run.max_restarts": 0}, step_s=STEP_S) as training:
            begun, end_s = training.attempt(), time.monotonic() + chance.uniform(0.0, 20.0)
            while time.monotonic() < end_s and training.process.poll() is None:
                time.sleep(0.01)
            if training.attempt() > begun and chance.random() < 0.3:
                hosts = training.processes()
                if hosts and (trainer := chance.choice(hosts).trainer):
                    os.kill(trainer.pid, signal.SIGKILL)
                    assert training.finish()[0] in (0, ExitCode.INFRASTRUCTURE)
            training.kill_all()
    with Training(lab, tmp_path) as training:
        code, _, err = training.finish()
        assert code == 0, err
    _check_same_end(finished, tmp_path)


def _wait_for_chance(
    training: Training, chance: random.Random, earliest: int, latest: int, *, after: int = 0
) -> None:
    """Until a random moment within a random step."""
    training.wait_until_begun(chance.randint(earliest, latest), after)
    time.sleep(chance.uniform(0.0, STEP_S))


def _check_lost_work(training: Training, attempt: int, begun: int) -> None:
    """After a kill in step ``begun``: at most the save that was under way is lost."""
    start = training.run.attempt_start(attempt)
    assert start is not None
    due = (begun - 1) // SAVE_INTERVAL * SAVE_INTERVAL
    assert start.from_step >= due - SAVE_INTERVAL, f"killed in step {begun}, resumed from {start.from_step}"


def _check_same_end(finished: Path, root: Path) -> None:
    undisturbed, cut = look_at(finished), look_at(root)
    assert differences(undisturbed, cut) == []
    assert set(cut.losses) == set(cut.rows) == set(range(1, NUM_STEPS + 1))
    assert set(cut.held_out) == set(range(EVAL_INTERVAL, NUM_STEPS + 1, EVAL_INTERVAL))
    last = f"quickstart/checkpoints/{NUM_STEPS}"
    expected, found = digests(read_arrays(finished / last)), digests(read_arrays(root / last))
    assert "step" in expected
    assert len(expected) > 20
    assert [path for path in expected if expected[path] != found.get(path)] == []
    assert expected.keys() == found.keys()
    assert not (root / "quickstart" / "quarantine").exists()
