"""What ends mean: one trainer's, and those of all hosts of an attempt."""

from __future__ import annotations

import pytest

from launcher.exits import HostEnd, TrainerEnd, attempt_outcome, classify, describe_status
from recipes.contract import ExitCode, Failure

NAN = Failure(exit_code=1, message="the loss is NaN", hint="lower it", time_s=1.0)
GLOO = Failure(exit_code=75, message="Gloo: Connection closed by peer", hint="restart", time_s=1.0)


@pytest.mark.parametrize(
    ("end", "code", "status", "reason"),
    [
        (TrainerEnd(returncode=0), 0, 0, "complete"),
        (TrainerEnd(returncode=0, stopping=True), 0, 0, "complete"),
        (TrainerEnd(returncode=42), 42, 42, "stopped cleanly after another host's notice"),
        (TrainerEnd(returncode=1, failure=NAN), 1, 1, "the loss is NaN"),
        (TrainerEnd(returncode=1, tail=["Traceback", "KeyError: 'x'", ""]), 1, 1, "KeyError: 'x'"),
        (TrainerEnd(returncode=2), 2, 2, "trainer ended with exit code 2"),
        (TrainerEnd(returncode=75), 75, 75, "exit code 75"),
        (TrainerEnd(returncode=3), 75, 3, "exit code 3"),
        (TrainerEnd(returncode=-6, fatal_line=True), 75, 134, "a peer or the coordinator was lost"),
        (TrainerEnd(returncode=134, fatal_line=True), 75, 134, "a peer or the coordinator was lost"),
        (TrainerEnd(returncode=-6), 75, 134, "SIGABRT"),
        (TrainerEnd(returncode=-9), 75, 137, "SIGKILL"),
        (TrainerEnd(returncode=-11), 75, 139, "SIGSEGV"),
        (TrainerEnd(returncode=-15), 42, 143, "ended by a notice at its start"),
        (TrainerEnd(returncode=75, failure=GLOO), 75, 75, "Connection closed by peer"),
        (TrainerEnd(returncode=-9, hang="hung: nothing moved"), 75, 137, "hung: nothing moved"),
        # After SIGTERM: never 1 or 2.
        (TrainerEnd(returncode=42, stopping=True), 42, 42, "stopped cleanly"),
        (TrainerEnd(returncode=1, stopping=True, failure=NAN), 42, 1, "with exit code 1"),
        (TrainerEnd(returncode=2, stopping=True), 42, 2, "with exit code 2"),
        (TrainerEnd(returncode=-6, stopping=True, fatal_line=True), 75, 134, "a peer"),
        (TrainerEnd(returncode=75, stopping=True, failure=GLOO), 75, 75, "Connection closed by peer"),
        (TrainerEnd(returncode=75, stopping=True), 42, 75, "with exit code 75"),
        (TrainerEnd(returncode=-15, stopping=True), 42, 143, "SIGTERM"),
        (TrainerEnd(returncode=-9, stopping=True, needless=True), 42, 137, "nothing to save"),
        (TrainerEnd(returncode=-9, stopping=True, out_of_time=True), 42, 137, "end of the grace period"),
    ],
)
def test_classify(end: TrainerEnd, code: int, status: int, reason: str) -> None:
    verdict = classify(end)
    assert (verdict.exit_code, verdict.status) == (code, status)
    assert reason in verdict.reason


def test_what_another_host_caused_is_collateral() -> None:
    assert classify(TrainerEnd(returncode=-6, fatal_line=True)).collateral
    assert classify(TrainerEnd(returncode=42)).collateral
    assert classify(TrainerEnd(returncode=75, failure=GLOO)).collateral
    assert not classify(TrainerEnd(returncode=42, stopping=True)).collateral
    assert not classify(TrainerEnd(returncode=-9)).collateral


def test_the_hint_of_a_known_failure_is_kept() -> None:
    assert classify(TrainerEnd(returncode=1, failure=NAN)).hint == "lower it"


def test_describe_status() -> None:
    assert [describe_status(status) for status in (3, 137, 255)] == [
        "exit code 3",
        "SIGKILL",
        "exit code 255",
    ]


def _end(host: str, code: int, time_s: float, *, collateral: bool = False, report_s: float = 0.0) -> HostEnd:
    return HostEnd(
        host=host,
        exit_code=code,
        reason=f"{host} reason",
        time_s=time_s,
        collateral=collateral,
        hung=report_s > 0,
        last_report_s=report_s,
    )


@pytest.mark.parametrize(
    ("ends", "code", "host"),
    [
        ([_end("a", 0, 1), _end("b", 0, 2)], 0, ""),
        ([_end("a", 42, 2), _end("b", 42, 1)], 42, "b"),
        # The one that failed is named, not those that it took down.
        ([_end("a", 75, 1, collateral=True), _end("b", 75, 2)], 75, "b"),
        ([_end("a", 75, 9), _end("b", 75, 8), _end("c", 75, 7, collateral=True)], 75, "b"),
        # A clean stop that another host's death caused does not make the attempt a preemption.
        ([_end("a", -9, 1), _end("b", 42, 2, collateral=True)], 75, "a"),
        ([_end("a", 75, 1, collateral=True), _end("b", 42, 2, collateral=True)], 75, "a"),
        # The host that got the notice is named, not the one that was quicker.
        ([_end("a", 42, 2), _end("b", 42, 1, collateral=True)], 42, "a"),
        # A notice that no agent saw, but its trainer did.
        ([_end("a", 42, 2, collateral=True), _end("b", 42, 1, collateral=True)], 42, "b"),
        # A preempted host takes its peers down: the notice is the cause.
        ([_end("a", 75, 1), _end("b", 42, 2)], 42, "b"),
        # The user's error wins over whatever else happened, the earliest of them.
        ([_end("a", 75, 1), _end("b", 1, 3), _end("c", 2, 2)], 2, "c"),
        ([_end("a", 1, 5), _end("b", 42, 1)], 1, "a"),
        ([_end("a", 0, 1), _end("b", 75, 2)], 75, "b"),
        # All hang together; the stuck one stopped reporting first.
        ([_end("a", 75, 1, report_s=100.0), _end("b", 75, 2, report_s=90.0)], 75, "b"),
        ([_end("a", 75, 1, report_s=100.0), _end("b", 75, 2, report_s=99.5)], 75, "a"),
    ],
)
def test_attempt_outcome(ends: list[HostEnd], code: int, host: str) -> None:
    outcome = attempt_outcome(ends)
    assert (outcome.exit_code, outcome.host) == (code, host)
    assert isinstance(outcome.exit_code, ExitCode)
