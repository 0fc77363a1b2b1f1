"""How a trainer ends: an exception becomes one exit code, one message and no hanging peers.

Facts behind the patterns: a lost peer aborts the process (SIGABRT) or raises from the runtime with
a gRPC or gloo status; neither is the user's mistake, so both must come out as INFRASTRUCTURE.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from recipes.contract import FAILURE_FILE, ExitCode, Failure
from recipes.errors import UserError

_INFRASTRUCTURE = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|coordination service|heartbeat"
    r"|Connection (reset|closed|refused)|Socket closed|barrier timed out|Barrier",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)


def classify(error: BaseException) -> Failure:
    """The exit code and message of an exception that ended training."""
    if isinstance(error, UserError):
        return _failure(error.exit_code, error.message, error.hint)
    if isinstance(error, OSError) and error.filename is not None:
        return _failure(
            ExitCode.BAD_INPUT, f"{error.strerror}: {error.filename}", "check the path and its rights"
        )
    text = f"{type(error).__name__}: {error}"
    # What the JAX runtime raises is a RuntimeError.
    if isinstance(error, RuntimeError | TimeoutError):
        if _OUT_OF_MEMORY.search(text):
            hint = (
                "use more shards (mesh.fsdp), train.remat_policy=full, or a smaller train.global_batch_size"
            )
            return _failure(ExitCode.BAD_INPUT, _first_line(text), hint)
        if _INFRASTRUCTURE.search(text):
            return _failure(
                ExitCode.INFRASTRUCTURE, _first_line(text), "restart; the first failing host says why"
            )
    return _failure(ExitCode.EXPERIMENT_FAILED, _first_line(text), "the traceback is in this host's log")


def end_process(failure: Failure, error: BaseException, scratch_dir: str | None) -> NoReturn:
    """Writes FAILURE_FILE, prints, and leaves at once.

    ``os._exit``, because a normal exit would wait for peers at the shutdown barrier while they wait
    for this process in a collective.
    """
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    print(f"error: {failure.message}", file=sys.stderr)
    if failure.hint:
        print(f"hint: {failure.hint}", file=sys.stderr)
    try:
        if scratch_dir is not None:
            Path(scratch_dir, FAILURE_FILE).write_text(json.dumps(asdict(failure)))
    except OSError as unwritable:
        print(f"warning: cannot write {FAILURE_FILE}: {unwritable}", file=sys.stderr)
    leave(failure.exit_code)


def leave(exit_code: int) -> NoReturn:
    """Flushes and ends the process without interpreter teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _failure(exit_code: int, message: str, hint: str) -> Failure:
    return Failure(exit_code=int(exit_code), message=message, hint=hint, time_s=time.time())


def _first_line(text: str) -> str:
    return text.splitlines()[0][:500]
