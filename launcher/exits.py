"""What an ended trainer or attempt means: pure classification, no processes.

``classify`` maps one trainer's end to the exit code of its agent; ``attempt_outcome`` maps the ends of all
hosts to the outcome of the attempt and names the host that failed first, not those that died of it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.ledger import AttemptEnd, HostRecord
from recipes.contract import ExitCode, Failure

FATAL_LINE = "Terminating process because the JAX distributed service detected fatal errors"
"""What JAX's coordination client writes (absl, stderr) before it aborts: a peer was lost."""

OTHERS_NOTICE = "stopped cleanly after another host's notice"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerEnd:
    """How one trainer process ended, as its agent saw it."""

    returncode: int
    """As of subprocess: negative for a signal."""
    stopping: bool = False
    """SIGTERM reached the agent before the trainer ended."""
    out_of_time: bool = False
    """The agent killed it because the grace period was nearly over, or because it was told to hurry."""
    needless: bool = False
    """The agent killed it because it had not made a step yet, so that waiting for it had saved nothing."""
    hang: str = ""
    """Why the agent took it for hung; empty when it did not."""
    fatal_line: bool = False
    """FATAL_LINE was in its output."""
    failure: Failure | None = None
    tail: Sequence[str] = ()
    """Last lines of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a trainer's end means."""

    exit_code: ExitCode
    """The agent's own exit code."""
    status: int
    """The trainer's exit status as a shell shows it: 128 + signal for a signal."""
    reason: str
    hint: str = ""
    collateral: bool = False
    """It died of another host's absence."""


def shell_status(returncode: int) -> int:
    """``128 + n`` for signal n, the code itself otherwise."""
    return 128 - returncode if returncode < 0 else returncode


def classify(end: TrainerEnd) -> Verdict:
    """The verdict on one trainer. After SIGTERM never 1 or 2: a suspended JobSet would fail for good."""
    status = shell_status(end.returncode)
    hint = end.failure.hint if end.failure else ""
    if end.returncode == 0:
        return Verdict(exit_code=ExitCode.COMPLETE, status=0, reason="complete")
    if end.hang:
        return Verdict(exit_code=ExitCode.INFRASTRUCTURE, status=status, reason=end.hang)
    peer_lost = status == 128 + signal.SIGABRT and end.fatal_line
    # The runtime's own report of a broken connection can be there before a killed host is noticed.
    reported = status == ExitCode.INFRASTRUCTURE and end.failure is not None
    if end.stopping and not (peer_lost or reported):
        return Verdict(
            exit_code=ExitCode.PREEMPTED, status=status, reason=_stop_reason(end, status), hint=hint
        )
    if status == ExitCode.PREEMPTED:
        return Verdict(exit_code=ExitCode.PREEMPTED, status=status, reason=OTHERS_NOTICE, collateral=True)
    if status == 128 + signal.SIGTERM:
        # A notice that did not come through the agent, before the trainer listened: nothing to save yet.
        return Verdict(exit_code=ExitCode.PREEMPTED, status=status, reason="ended by a notice at its start")
    if status in (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT):
        return Verdict(exit_code=ExitCode(status), status=status, reason=_message(end, status), hint=hint)
    return Verdict(
        exit_code=ExitCode.INFRASTRUCTURE,
        status=status,
        reason="a peer or the coordinator was lost" if peer_lost else _message(end, status),
        hint=hint,
        collateral=peer_lost or reported,
    )


def _stop_reason(end: TrainerEnd, status: int) -> str:
    if end.needless:
        return "ended at a notice before its first step: nothing to save"
    if end.out_of_time:
        return "killed at the end of the grace period, before it had stopped by itself"
    if status == ExitCode.PREEMPTED:
        return "stopped cleanly after a notice"
    return f"stopped after a notice with {describe_status(status)}"


def _message(end: TrainerEnd, status: int) -> str:
    if end.failure:
        return end.failure.message
    # What is killed from outside says nothing about it.
    lines = () if status == 128 + signal.SIGKILL else reversed(end.tail)
    last = next((line.strip() for line in lines if line.strip()), "")
    return f"trainer ended with {describe_status(status)}" + (f"; its last line: {last}" if last else "")


def describe_status(status: int) -> str:
    """``exit code 3`` or ``SIGKILL``."""
    if status <= 128:
        return f"exit code {status}"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"exit code {status}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEnd:
    """How one host of an attempt ended."""

    host: str
    exit_code: int
    """Of the agent; negative when it died of a signal itself."""
    reason: str
    hint: str = ""
    time_s: float
    """Unix time of the first sign of it."""
    collateral: bool = False
    """Died of, or was stopped because of, another host's end."""
    hung: bool = False
    last_report_s: float = 0.0
    """Unix time of its last progress report; tells a stuck host from those that waited for it."""


def host_end(record: HostRecord, end_s: float) -> HostEnd:
    """How a host ended, from the record that its agent closed at ``end_s``."""
    code = ExitCode.INFRASTRUCTURE if record.exit_code is None else record.exit_code
    return HostEnd(
        host=record.host,
        exit_code=code,
        reason=record.reason,
        hint=record.hint,
        time_s=end_s,
        collateral=record.collateral,
        hung=record.hung,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOutcome:
    """How an attempt ended, and of whom."""

    exit_code: ExitCode
    reason: str
    hint: str = ""
    host: str = ""
    """The host that failed first; empty when complete."""

    def end(self, *, now: float, from_step: int, to_step: int) -> AttemptEnd:
        """What the run directory keeps of it.

        Args:
          now: Unix time.
          from_step: newest committed step at the start of the attempt, -1 when none.
          to_step: the same at its end.
        """
        return AttemptEnd(
            end_s=now,
            exit_code=int(self.exit_code),
            first_failing_host=self.host or None,
            message="" if self.exit_code == ExitCode.COMPLETE else self.reason,
            hint=self.hint,
            from_step=from_step,
            to_step=to_step,
        )


def attempt_outcome(ends: Sequence[HostEnd]) -> AttemptOutcome:
    """The outcome of an attempt whose hosts ended so.

    The user's error (1, 2) wins, earliest first; then any failure that is not collateral, then a clean stop.
    """
    if all(end.exit_code == ExitCode.COMPLETE for end in ends):
        return AttemptOutcome(exit_code=ExitCode.COMPLETE, reason="complete")
    failed = sorted((end for end in ends if end.exit_code != ExitCode.COMPLETE), key=_order)
    users = [end for end in failed if end.exit_code in (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT)]
    if users:
        return _outcome(ExitCode(users[0].exit_code), users[0])
    own = [end for end in failed if not end.collateral]
    stopped = [end for end in own or failed if end.exit_code == ExitCode.PREEMPTED]
    if stopped and (own or len(stopped) == len(failed)):
        return _outcome(ExitCode.PREEMPTED, stopped[0])
    return _outcome(ExitCode.INFRASTRUCTURE, _stuck(own) or (own or failed)[0])


REPORT_SPREAD_S = 3.0
"""Hosts report each second; one that fell silent this much before the others is the stuck one."""


def _stuck(ends: Sequence[HostEnd]) -> HostEnd | None:
    """Of hosts that hung together, the one whose reports ended first; None when they cannot be told apart."""
    hung = sorted((end for end in ends if end.hung), key=lambda end: end.last_report_s)
    if len(hung) > 1 and hung[1].last_report_s - hung[0].last_report_s >= REPORT_SPREAD_S:
        return hung[0]
    return None


def _order(end: HostEnd) -> tuple[float, str]:
    return end.time_s, end.host


def _outcome(code: ExitCode, end: HostEnd) -> AttemptOutcome:
    return AttemptOutcome(exit_code=code, reason=end.reason, hint=end.hint, host=end.host)
