"""How an exception that ends training becomes an exit code."""

from __future__ import annotations

import pytest

from recipes.contract import ExitCode
from recipes.errors import UserError
from trainer.exits import classify


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such file", hint="look"), ExitCode.BAD_INPUT, "no such file"),
        (UserError("loss is nan", exit_code=1), ExitCode.EXPERIMENT_FAILED, "loss is nan"),
        (PermissionError(13, "Permission denied", "/data"), ExitCode.BAD_INPUT, "/data"),
        (OSError(28, "No space left on device", "/runs"), ExitCode.BAD_INPUT, "No space left"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), ExitCode.BAD_INPUT, "RESOURCE_EXHAUSTED"),
        (RuntimeError("UNAVAILABLE: failed to connect"), ExitCode.INFRASTRUCTURE, "UNAVAILABLE"),
        (RuntimeError("DEADLINE_EXCEEDED: Barrier timed out"), ExitCode.INFRASTRUCTURE, "DEADLINE"),
        (RuntimeError("Gloo: Connection reset by peer"), ExitCode.INFRASTRUCTURE, "Connection reset"),
        (TimeoutError("barrier timed out"), ExitCode.INFRASTRUCTURE, "barrier"),
        (RuntimeError("INVALID_ARGUMENT: shapes"), ExitCode.EXPERIMENT_FAILED, "INVALID_ARGUMENT"),
        (ZeroDivisionError("division by zero"), ExitCode.EXPERIMENT_FAILED, "ZeroDivisionError"),
        (ValueError("UNAVAILABLE is only a word here"), ExitCode.EXPERIMENT_FAILED, "ValueError"),
    ],
)
def test_code_and_message(error: Exception, code: ExitCode, said: str) -> None:
    failure = classify(error)
    assert failure.exit_code == code
    assert said in failure.message


def test_only_the_first_line_and_not_all_of_it() -> None:
    failure = classify(RuntimeError("x" * 2000 + "\nsecond"))
    assert len(failure.message) <= 500
    assert "second" not in failure.message
