"""When a run has ended, from how its attempts did: one table."""

from __future__ import annotations

import pytest

from launcher.budget import judge
from launcher.ledger import AttemptEnd
from recipes.contract import ExitCode

NO_STEP = (-1, -1)


def end(code: int, steps: tuple[int, int] = NO_STEP, *, host: str | None = "s0-h0") -> AttemptEnd:
    return AttemptEnd(
        end_s=1.0,
        exit_code=code,
        first_failing_host=host,
        message=f"said {code}" if code else "",
        hint="mend it",
        from_step=steps[0],
        to_step=steps[1],
    )


DONE, LOST, NOTICE = end(0, (9, 20)), end(75), end(42)
FRUITFUL, SAVED = end(75, (3, 9)), end(42, (3, 9))


@pytest.mark.parametrize(
    ("ends", "code", "reason"),
    [
        ([], None, ""),
        ([DONE], 0, "complete"),
        ([LOST, LOST, DONE], 0, "complete"),
        ([end(1)], 1, "s0-h0: said 1"),
        ([SAVED, end(2)], 2, "s0-h0: said 2"),
        ([end(1, host=None)], 1, "said 1"),
        ([NOTICE], None, ""),
        ([NOTICE] * 50, None, ""),
        ([SAVED] * 50, None, ""),
        ([LOST], None, ""),
        ([LOST, LOST], None, ""),
        ([LOST, LOST, LOST], 1, "3 attempts in a row committed no new step"),
        ([LOST, NOTICE, LOST, NOTICE, LOST], 1, "3 attempts in a row"),
        ([LOST, NOTICE, LOST, NOTICE], None, ""),
        ([LOST, LOST, FRUITFUL], None, ""),
        ([LOST, LOST, SAVED, LOST], None, ""),
        ([FRUITFUL] * 4, None, ""),
        ([FRUITFUL] * 5, 75, "5 attempts failed (run.max_restarts=4); the last: s0-h0: said 75"),
        ([FRUITFUL, NOTICE, SAVED] * 4, None, ""),
        ([FRUITFUL, NOTICE, SAVED] * 5, 75, "5 attempts failed (run.max_restarts=4)"),
        ([FRUITFUL] * 2 + [LOST] * 3, 75, "5 attempts failed"),
    ],
)
def test_verdicts(ends: list[AttemptEnd], code: int | None, reason: str) -> None:
    verdict = judge(ends, max_restarts=4, max_attempts_without_progress=3)
    if code is None:
        assert verdict is None
        return
    assert verdict is not None
    assert verdict.exit_code == code
    assert verdict.reason.startswith(reason)


def test_the_verdict_names_the_last_failure_not_the_notice_after_it() -> None:
    ends = [end(75, host=f"s{number}-h0") for number in range(2)] + [NOTICE]
    verdict = judge(ends, max_restarts=9, max_attempts_without_progress=2)
    assert verdict is not None
    assert (verdict.host, verdict.hint) == ("s1-h0", "mend it")
    assert verdict.exit_code is ExitCode.EXPERIMENT_FAILED


def test_no_restart_at_all() -> None:
    verdict = judge([LOST], max_restarts=0, max_attempts_without_progress=3)
    assert verdict is not None
    assert verdict.exit_code is ExitCode.INFRASTRUCTURE
