"""Opening and closing attempts where nobody stands outside: process 0 of the hosts keeps the books.

What `launcher.restarts` does for local runs, JobSet and these functions do together: JobSet restarts
and counts failures, process 0 numbers the attempts, ends those that could not do it themselves and
stops a job that restarts without getting on. On TPU VMs process 0 counts failures too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launcher.budget import Verdict, judge
from launcher.exits import AttemptOutcome, HostEnd, attempt_outcome, host_end
from launcher.ledger import AttemptEnd, AttemptStart, HostRecord
from launcher.rundir import READERS, RunDir, committed_step
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema import Recipe

JOB = "job"
"""In an attempt's lock: which launch it belongs to."""
MAX_HOSTS_READ = 64
"""With more hosts, those that did not call process 0 are taken as lost, not read one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What an attempt begins with."""

    recipe: Recipe
    hosts: Sequence[str]
    job: str
    """Uid of the JobSet, or id of the order: restarts of one launch share it."""
    lock: Mapping[str, Any]


def open_attempt(run: RunDir, opening: Opening, now: float) -> int:
    """Numbers a new attempt, after ending the one before it and looking whether the job gets on.

    Raises:
      UserError: as many attempts of this job as the recipe allows committed no new step.
    """
    close_last(run, now)
    _refuse_crash_loop(run, opening)
    return number_attempt(run, opening, now)


def number_attempt(run: RunDir, opening: Opening, now: float) -> int:
    """Numbers a new attempt, whatever came before it."""
    lock = {**opening.lock, JOB: opening.job}
    return run.next_attempt(now, recipe=opening.recipe, hosts=opening.hosts, lock=lock)


def verdict(run: RunDir, recipe: Recipe, job: str) -> Verdict | None:
    """How a job has ended, by all its attempts; None: it goes on."""
    numbers = run.attempts()
    if not numbers:
        return None
    # In a bucket each takes some 50 ms, and there may be hundreds after a day of preemptions.
    with ThreadPoolExecutor(min(READERS, len(numbers))) as pool:
        starts = list(pool.map(run.attempt_start, numbers))
        own = [number for number, start in zip(numbers, starts, strict=True) if _is_of(start, job)]
        ends = list(pool.map(run.attempt_end, own))
    return judge(
        [end for end in ends if end is not None],
        max_restarts=recipe.run.max_restarts,
        max_attempts_without_progress=recipe.run.max_attempts_without_progress,
    )


def close_last(run: RunDir, now: float) -> None:
    """Ends the newest attempt, if its process 0 died before it could; from what its hosts left."""
    attempts = run.attempts()
    if not attempts or run.attempt_end(attempts[-1]) is not None:
        return
    if run.attempt_start(attempts[-1]) is not None:
        close_attempt(run, attempts[-1], {}, now=now)


def close_attempt(run: RunDir, attempt: int, told: Mapping[str, HostEnd], *, now: float) -> AttemptOutcome:
    """Writes how an attempt ended, and returns it.

    Args:
      run: its run.
      attempt: its number.
      told: how hosts ended that said so.
      now: Unix time.
    """
    start = run.attempt_start(attempt)
    ends, hosts = dict(told), start.hosts if start else tuple(told)
    if len(ends) < len(hosts) <= MAX_HOSTS_READ:
        ends = {**{record.host: end_of(record) for record in run.hosts(attempt)}, **ends}
    outcome = attempt_outcome(_blamed([ends.get(host) or _lost(host) for host in hosts]))
    from_step = start.from_step if start else -1
    end = outcome.end(now=now, from_step=from_step, to_step=committed_step(run.storage))
    run.write_attempt_end(attempt, end)
    return outcome


def end_of(record: HostRecord) -> HostEnd:
    """How a host ended, from its own record; lost when its agent did not close it."""
    if record.exit_code is None or record.end_s is None:
        return _lost(record.host)
    return host_end(record, record.end_s)


def _lost(host: str) -> HostEnd:
    return HostEnd(
        host=host,
        exit_code=ExitCode.INFRASTRUCTURE,
        reason="it was lost: its node went away, or it was killed there",
        time_s=math.inf,
    )


def _blamed(ends: Sequence[HostEnd]) -> Sequence[HostEnd]:
    """The same ends; hosts that JobSet stopped because another had failed are not taken for the cause.

    When a lost host was lost nobody knows. It comes after every failure that is known, whose host may only
    have been quicker to say so, and before everything that was done about it.
    """
    failures = [end.time_s for end in ends if end.exit_code == ExitCode.INFRASTRUCTURE and not end.collateral]
    first_s = min(failures, default=math.inf)
    nobody_else = bool(failures) and math.isinf(first_s)
    return [
        dataclasses.replace(end, collateral=True)
        if end.exit_code == ExitCode.PREEMPTED and (nobody_else or end.time_s > first_s)
        else end
        for end in ends
    ]


def _refuse_crash_loop(run: RunDir, opening: Opening) -> None:
    limit = opening.recipe.run.max_attempts_without_progress
    ends = [run.attempt_end(attempt) for attempt in itertools.islice(_of_job(run, opening.job), limit)]
    if len(ends) < limit or any(end is None or _got_on(end) for end in ends):
        return
    last = ends[0]
    assert last is not None
    host = f"{last.first_failing_host}: " if last.first_failing_host else ""
    raise UserError(
        f"{limit} attempts in a row committed no new step (run.max_attempts_without_progress={limit});"
        f" the last: {host}{last.message}",
        hint="read the log of that host, mend the cause, and launch again",
        exit_code=ExitCode.EXPERIMENT_FAILED,
    )


def _got_on(end: AttemptEnd) -> bool:
    return end.to_step > end.from_step or end.exit_code == ExitCode.COMPLETE


def _of_job(run: RunDir, job: str) -> Iterable[int]:
    """The attempts of one launch, newest first."""
    for attempt in reversed(run.attempts()):
        start = run.attempt_start(attempt)
        if not _is_of(start, job):
            return
        yield attempt


def _is_of(start: AttemptStart | None, job: str) -> bool:
    return start is not None and start.lock.get(JOB) == job
