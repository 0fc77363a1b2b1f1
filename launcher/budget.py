"""Whether a run has ended, from how its attempts did: pure, and the same for everybody who asks.

Process 0 on TPU VMs and the supervisor both ask, of the same ledger, so they come to the same verdict
without telling each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.ledger import AttemptEnd
from recipes.contract import ExitCode


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A run has ended, and how."""

    exit_code: ExitCode
    reason: str
    hint: str
    host: str
    """The host that failed first; empty when none did."""


def judge(
    ends: Sequence[AttemptEnd], *, max_restarts: int, max_attempts_without_progress: int
) -> Verdict | None:
    """The verdict on a run whose attempts ended so; None: it goes on.

    Preemptions are never counted. The user's errors end it at once, and so does a crash loop: attempts
    that failed in a row, preemptions aside, without a newly committed step.

    Args:
      ends: of the attempts of one launch, oldest first.
      max_restarts: failures that are allowed.
      max_attempts_without_progress: failures in a row without progress that end it.
    """
    last = ends[-1] if ends else None
    if last is None:
        return None
    if last.exit_code == ExitCode.COMPLETE:
        return Verdict(exit_code=ExitCode.COMPLETE, reason="complete", hint="", host="")
    if last.exit_code in (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT):
        return _verdict(ExitCode(last.exit_code), "", last)
    failures = [end for end in ends if end.exit_code != ExitCode.PREEMPTED]
    if len(failures) > max_restarts:
        limit = f"{len(failures)} attempts failed (run.max_restarts={max_restarts}); the last: "
        return _verdict(ExitCode.INFRASTRUCTURE, limit, failures[-1])
    in_a_row = _without_progress(ends)
    if len(in_a_row) >= max_attempts_without_progress:
        limit = (
            f"{len(in_a_row)} attempts in a row committed no new step"
            f" (run.max_attempts_without_progress={max_attempts_without_progress}); the last: "
        )
        return _verdict(ExitCode.EXPERIMENT_FAILED, limit, in_a_row[0])
    return None


def _without_progress(ends: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    """Newest first: failures since a step was committed last."""
    found: list[AttemptEnd] = []
    for end in reversed(ends):
        if end.to_step > end.from_step:
            break
        if end.exit_code != ExitCode.PREEMPTED:
            found.append(end)
    return found


def _verdict(code: ExitCode, prefix: str, end: AttemptEnd) -> Verdict:
    host = end.first_failing_host or ""
    where = f"{host}: " if host else ""
    return Verdict(exit_code=code, reason=f"{prefix}{where}{end.message}", hint=end.hint, host=host)
