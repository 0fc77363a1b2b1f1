"""decide, as a table."""

from __future__ import annotations

import pytest

from launcher.restarts import Budget, Observed, decide
from recipes.contract import ExitCode

OK, FAILED, BAD, PREEMPTED, INFRA = 0, 1, 2, 42, 75


def _budget(failures: int = 0, without_progress: int = 0) -> Budget:
    return Budget(
        max_restarts=2,
        max_attempts_without_progress=3,
        failures=failures,
        without_progress=without_progress,
    )


@pytest.mark.parametrize(
    ("code", "progressed", "asked", "budget", "restart", "after", "backoff_s"),
    [
        (OK, True, False, _budget(), False, _budget(), 0),
        (FAILED, True, False, _budget(), False, _budget(), 0),
        (BAD, False, False, _budget(), False, _budget(0, 1), 0),
        # Preemptions are not counted, however many; and they wait for nothing.
        (PREEMPTED, True, False, _budget(2, 2), True, _budget(2, 0), 0),
        (PREEMPTED, False, False, _budget(0, 1), True, _budget(0, 2), 0),
        (PREEMPTED, False, False, _budget(0, 2), False, _budget(0, 3), 0),
        (PREEMPTED, True, True, _budget(), False, _budget(), 0),
        # Failures are.
        (INFRA, True, False, _budget(), True, _budget(1, 0), 0),
        (INFRA, True, False, _budget(1), True, _budget(2, 0), 0),
        (INFRA, True, False, _budget(2), False, _budget(3, 0), 0),
        (INFRA, False, False, _budget(), True, _budget(1, 1), 1),
        (INFRA, False, False, _budget(1, 1), True, _budget(2, 2), 2),
        (INFRA, False, False, _budget(0, 2), False, _budget(1, 3), 0),
        (INFRA, True, False, _budget(0, 2), True, _budget(1, 0), 0),
        (INFRA, True, True, _budget(), False, _budget(1, 0), 0),
    ],
)
def test_decide(
    code: int, progressed: bool, asked: bool, budget: Budget, restart: bool, after: Budget, backoff_s: float
) -> None:
    observed = Observed(
        exit_code=ExitCode(code), reason="s0-h1: why", progressed=progressed, stop_requested=asked
    )
    decision = decide(observed, budget)
    assert (decision.restart, decision.exit_code, decision.budget) == (restart, code, after)
    assert decision.backoff_s == backoff_s


@pytest.mark.parametrize(
    ("observed", "budget", "reason"),
    [
        (
            Observed(exit_code=ExitCode.INFRASTRUCTURE, reason="x", progressed=True),
            _budget(2),
            "run.max_restarts=2",
        ),
        (
            Observed(exit_code=ExitCode.PREEMPTED, reason="x", progressed=False),
            _budget(0, 2),
            "3 attempts in a row committed no new step (run.max_attempts_without_progress=3); the last: x",
        ),
        (
            Observed(exit_code=ExitCode.PREEMPTED, reason="x", progressed=True, stop_requested=True),
            _budget(),
            "stopped as asked",
        ),
        (
            Observed(exit_code=ExitCode.INFRASTRUCTURE, reason="x", progressed=True, stop_requested=True),
            _budget(),
            "stopped as asked; x",
        ),
        (
            Observed(exit_code=ExitCode.PREEMPTED, reason="x", progressed=True, restart_allowed=False),
            _budget(),
            "--no-restart",
        ),
    ],
)
def test_the_reason_says_which_limit(observed: Observed, budget: Budget, reason: str) -> None:
    decision = decide(observed, budget)
    assert not decision.restart
    assert reason in decision.reason


def test_the_back_off_has_an_end() -> None:
    observed = Observed(exit_code=ExitCode.INFRASTRUCTURE, reason="x", progressed=False)
    budget = Budget(max_restarts=1000, max_attempts_without_progress=1000, without_progress=500)
    assert decide(observed, budget).backoff_s == 60.0
