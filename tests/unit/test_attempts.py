"""How process 0 of a JobSet keeps the run's books: a real run directory, no processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.attempts import Opening, close_attempt, close_last, number_attempt, open_attempt, verdict
from launcher.exits import HostEnd
from launcher.ledger import AttemptEnd, HostRecord
from launcher.rundir import RunDir
from recipes.contract import ExitCode
from recipes.errors import UserError
from tests.unit.rundir_support import commit_checkpoint, make_run

HOSTS = ("s0-h0", "s1-h0")


def opened(run: RunDir, *, job: str = "job-1", now: float = 100.0) -> int:
    opening = Opening(recipe=run.recipe(), hosts=HOSTS, job=job, lock={"bundle": None})
    return open_attempt(run, opening, now)


def ended(host: str, code: int, *, at_s: float = 10.0, collateral: bool = False) -> HostEnd:
    return HostEnd(
        host=host, exit_code=code, reason=f"{host} said {code}", time_s=at_s, collateral=collateral
    )


def told(*ends: HostEnd) -> Mapping[str, HostEnd]:
    return {end.host: end for end in ends}


def the_end(run: RunDir, attempt: int) -> AttemptEnd:
    end = run.attempt_end(attempt)
    assert end is not None
    return end


def fruitless(run: RunDir, *, job: str = "job-1", code: int = 75) -> None:
    attempt = opened(run, job=job)
    close_attempt(run, attempt, told(ended("s0-h0", code), ended("s1-h0", code)), now=200.0)


@pytest.mark.parametrize(
    ("ends", "code", "host", "message"),
    [
        (told(ended("s0-h0", 0), ended("s1-h0", 0)), 0, None, ""),
        (told(ended("s0-h0", 42), ended("s1-h0", 42)), 42, "s0-h0", "s0-h0 said 42"),
        (told(ended("s0-h0", 42), ended("s1-h0", 1)), 1, "s1-h0", "s1-h0 said 1"),
        (told(ended("s0-h0", 42, at_s=12.0), ended("s1-h0", 75)), 75, "s1-h0", "s1-h0 said 75"),
        (told(ended("s0-h0", 42), ended("s1-h0", 75, at_s=12.0)), 42, "s0-h0", "s0-h0 said 42"),
        (told(ended("s0-h0", 42)), 75, "s1-h0", "it was lost"),
        (told(ended("s0-h0", 75)), 75, "s0-h0", "s0-h0 said 75"),
        (told(ended("s0-h0", 1)), 1, "s0-h0", "s0-h0 said 1"),
        (
            told(ended("s0-h0", 75, collateral=True), ended("s1-h0", 75, at_s=11.0)),
            75,
            "s1-h0",
            "s1-h0 said 75",
        ),
        (told(ended("s0-h0", 75, collateral=True)), 75, "s1-h0", "it was lost"),
    ],
)
def test_how_an_attempt_ended(
    tmp_path: Path, ends: Mapping[str, HostEnd], code: int, host: str | None, message: str
) -> None:
    run = make_run(tmp_path)
    attempt = opened(run)
    close_attempt(run, attempt, ends, now=200.0)
    end = the_end(run, attempt)
    assert (end.exit_code, end.first_failing_host, end.end_s) == (code, host, 200.0)
    assert end.message.startswith(message) if message else end.message == ""


def test_a_host_that_did_not_call_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = opened(run)
    run.write_host(
        attempt,
        HostRecord(
            host="s1-h0",
            hostname="n",
            pid=1,
            start_s=1.0,
            end_s=9.0,
            exit_code=2,
            status=2,
            reason="bad recipe",
        ),
    )
    close_attempt(run, attempt, told(ended("s0-h0", 42)), now=200.0)
    assert (the_end(run, attempt).exit_code, the_end(run, attempt).message) == (2, "bad recipe")


def test_a_host_that_never_ended_was_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = opened(run)
    run.write_host(attempt, HostRecord(host="s1-h0", hostname="n", pid=1, start_s=1.0))
    close_attempt(run, attempt, told(ended("s0-h0", 75, collateral=True)), now=200.0)
    assert the_end(run, attempt).first_failing_host == "s1-h0"
    assert "its node went away" in the_end(run, attempt).message


def test_the_next_attempt_ends_the_one_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = opened(run)
    commit_checkpoint(run.storage, 5)
    second = opened(run, now=300.0)
    assert second == first + 1
    end = the_end(run, first)
    assert (end.exit_code, end.from_step, end.to_step, end.end_s) == (ExitCode.INFRASTRUCTURE, -1, 5, 300.0)
    assert run.attempt_end(second) is None


def test_an_end_that_is_there_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = opened(run)
    close_attempt(run, attempt, told(ended("s0-h0", 42), ended("s1-h0", 42)), now=200.0)
    close_last(run, 999.0)
    assert the_end(run, attempt).end_s == 200.0


def test_a_number_whose_claimer_died_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.storage.create("attempts/0001/recipe.yaml", b"half")
    assert opened(run) == 2
    assert run.attempt_end(1) is None


def test_a_crash_loop_is_stopped_with_its_last_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(3):
        fruitless(run)
    with pytest.raises(UserError, match="3 attempts in a row committed no new step") as caught:
        opened(run)
    assert caught.value.exit_code == ExitCode.EXPERIMENT_FAILED
    assert caught.value.message.endswith("the last: s0-h0: s0-h0 said 75")
    assert run.attempts() == [1, 2, 3]


def test_preemptions_that_get_nowhere_are_a_crash_loop_too(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(3):
        fruitless(run, code=42)
    with pytest.raises(UserError, match="committed no new step"):
        opened(run)


def test_progress_starts_the_count_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fruitless(run)
    fruitless(run)
    attempt = opened(run)
    commit_checkpoint(run.storage, 7)
    close_attempt(run, attempt, told(ended("s0-h0", 75), ended("s1-h0", 75)), now=200.0)
    fruitless(run)
    fruitless(run)
    assert opened(run) == 6


def test_another_launch_starts_the_count_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(3):
        fruitless(run, job="job-1")
    fruitless(run, job="job-2")
    fruitless(run, job="job-2")
    assert opened(run, job="job-2") == 6


def failed(run: RunDir, *, job: str = "order-1", code: int = 75, step: int | None = None) -> None:
    """One attempt where nobody else counts failures; it commits ``step``, if any."""
    opening = Opening(recipe=run.recipe(), hosts=HOSTS, job=job, lock={})
    attempt = number_attempt(run, opening, 100.0)
    if step is not None:
        commit_checkpoint(run.storage, step)
    close_attempt(run, attempt, told(ended("s0-h0", code), ended("s1-h0", code)), now=200.0)


def test_failures_are_counted_over_one_order(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    failed(run, job="order-0")
    for step in range(run.recipe().run.max_restarts):
        failed(run, step=step)
        failed(run, code=42)
        assert verdict(run, run.recipe(), "order-1") is None
    failed(run, step=9)
    found = verdict(run, run.recipe(), "order-1")
    assert found is not None
    assert found.exit_code == ExitCode.INFRASTRUCTURE
    assert found.reason == "4 attempts failed (run.max_restarts=3); the last: s0-h0: s0-h0 said 75"
    assert verdict(run, run.recipe(), "order-2") is None


def test_a_number_that_was_claimed_only_and_an_attempt_under_way_say_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for _ in range(2):
        failed(run)
    run.storage.create("attempts/0003/recipe.yaml", b"half")
    number_attempt(run, Opening(recipe=run.recipe(), hosts=HOSTS, job="order-1", lock={}), 300.0)
    assert verdict(run, run.recipe(), "order-1") is None
