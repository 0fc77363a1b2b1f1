"""What a run is doing now, from its run directory alone: what ``muster ls`` and ``status`` show."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher import lease
from launcher.ledger import AttemptEnd, Damaged, Heartbeat, HostRecord, StopRequest
from launcher.rundir import DamagedRecipe, RunDir, committed_step
from launcher.storage_types import Names
from recipes.contract import ExitCode, Phase, RunPath, host_name
from recipes.schema import Recipe

MANY_HOSTS = 64
"""With more, only the hosts that matter are read."""
SHOWN_HOSTS = 20


class RunState(enum.StrEnum):
    """What a run is doing, in one word."""

    CREATED = "created"
    """It has a directory and has never started."""
    RUNNING = "running"
    STOPPED = "stopped"
    """Nobody acts on it, because somebody asked; launching it again resumes it."""
    PREEMPTED = "preempted"
    """Ended cleanly after a notice; launching it again resumes it."""
    FAILED = "failed"
    COMPLETE = "complete"
    STALE = "stale"
    """It began an attempt that never ended, and nobody acts on it: its machine or launcher died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRow:
    """One host of the newest attempt."""

    host: str
    hostname: str
    pid: int | None
    phase: Phase | None
    step: int | None
    age_s: float | None
    """Since its last sign of life."""
    exit_code: int | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRow:
    """Why the newest attempt failed."""

    host: str | None
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run at one moment."""

    name: str
    url: str
    state: RunState
    step: int
    """Optimizer steps done, as far as anybody reported."""
    num_steps: int
    committed_step: int
    """-1: no checkpoint yet."""
    loss: float | None
    eval_loss: float | None
    eval_unigram_entropy_nats: float | None
    """Of the held-out tokens: what a model without context reaches at best."""
    step_time_s: float | None
    tokens_per_s: float | None
    attempts: int
    holder: str | None
    """Who acts on the run now."""
    updated_s: float | None
    """Unix time of the newest sign of life."""
    num_hosts: int
    """That have reported, ever."""
    hosts: Sequence[HostRow]
    """All of the newest attempt, or those that matter (see :func:`hosts_that_matter`)."""
    failure: FailureRow | None
    logs: str | None
    """Where the newest attempt's logs are."""
    damaged: Sequence[str]
    """What could not be read and was passed over."""


def summary(
    run: RunDir, now: float, *, all_hosts: bool = False, stand_in: Recipe | None = None
) -> RunSummary:
    """Reads the run.

    Args:
      run: where it is.
      now: Unix time.
      all_hosts: read every host, however many there are.
      stand_in: another copy of the recipe. With it a damaged recipe or lease is named and passed over.

    Raises:
      NotFound: there is no run here.
      UserError: the recipe or the lease is damaged; the message names it.
    """
    damaged: Names = []
    recipe = _recipe(run, stand_in, damaged)
    attempts = run.attempts()
    attempt = attempts[-1] if attempts else 0
    end = run.attempt_end(attempt, damaged) if attempt else None
    times = run.beat_times()
    only = None if all_hosts or len(times) <= MANY_HOSTS else hosts_that_matter(times, end)
    records = run.hosts(attempt, damaged, only=only) if attempt else ()
    read = run.heartbeats(damaged, only=only or times)
    beats = {beat.host: beat for beat in read if beat.attempt == attempt}
    holder = _holder(run, damaged, refuse=stand_in is None)
    held = lease.is_held(holder, now)
    committed = committed_step(run.storage)
    metrics = _metrics(run, beats)
    return RunSummary(
        name=run_name(run.url),
        url=run.url,
        state=run_state(held=held, attempts=len(attempts), end=end, stop=run.stop_request()),
        step=max([committed, 0, *(beat.progress.step for beat in beats.values())]),
        num_steps=recipe.train.num_steps,
        committed_step=committed,
        loss=metrics.get("train/loss"),
        eval_loss=metrics.get("eval/loss"),
        eval_unigram_entropy_nats=metrics.get("data/eval_unigram_entropy_nats"),
        step_time_s=metrics.get("perf/step_time_s"),
        tokens_per_s=metrics.get("perf/tokens_per_s"),
        attempts=len(attempts),
        holder=holder.holder() if holder and held else None,
        updated_s=max((beat.progress.time_s for beat in beats.values()), default=None),
        num_hosts=len(times),
        hosts=_host_rows(records, beats, now),
        failure=_failure(end, records),
        logs=f"{run.url}/{RunPath.ATTEMPTS}/{attempt:04d}/logs" if attempt else None,
        damaged=tuple(damaged),
    )


def _recipe(run: RunDir, stand_in: Recipe | None, damaged: Names) -> Recipe:
    try:
        return run.recipe()
    except DamagedRecipe as error:
        if stand_in is None:
            raise
        damaged.append(f"{error.message}; {error.hint}")
        return stand_in


def _holder(run: RunDir, damaged: Names, *, refuse: bool) -> lease.Lease | None:
    try:
        return lease.read(run.storage)
    except Damaged as error:
        if refuse:
            raise
        damaged.append(f"{error.message}; {error.hint}")
        return None


def hosts_that_matter(times: Mapping[str, float], end: AttemptEnd | None) -> Names:
    """Process 0, the first to fail, and those that have been silent for longest; SHOWN_HOSTS in all.

    Args:
      times: when each host last gave a sign of life.
      end: of the newest attempt.
    """
    first = end.first_failing_host if end else None
    silent = sorted(times, key=lambda host: (times[host], host))
    chosen = dict.fromkeys(host for host in (host_name(0, 0), first, *silent) if host is not None)
    return list(chosen)[:SHOWN_HOSTS]


def run_name(url: str) -> str:
    """The run's name: the last part of its address."""
    return url.rsplit("/", 1)[-1]


def run_state(*, held: bool, attempts: int, end: AttemptEnd | None, stop: StopRequest | None) -> RunState:
    """The state, from who holds the lease and how the newest attempt ended."""
    if end is not None and end.exit_code == ExitCode.COMPLETE:
        return RunState.COMPLETE
    if held:
        return RunState.RUNNING
    if attempts == 0 or end is None:
        # A host that is asked to stop before it began, or is ended after its grace, leaves no record.
        if stop is not None:
            return RunState.STOPPED
        return RunState.CREATED if attempts == 0 else RunState.STALE
    if end.exit_code == ExitCode.PREEMPTED:
        return RunState.STOPPED if stop is not None else RunState.PREEMPTED
    return RunState.FAILED


def _metrics(run: RunDir, beats: Mapping[str, Heartbeat]) -> Mapping[str, float]:
    """The newest that any host reported; only process 0 has them."""
    reported = [beat.progress for beat in beats.values() if beat.progress.metrics]
    newest = max(reported, key=lambda progress: progress.time_s, default=None)
    return newest.metrics if newest else {}


def _host_rows(
    records: Sequence[HostRecord], beats: Mapping[str, Heartbeat], now: float
) -> Sequence[HostRow]:
    known = {record.host: record for record in records}
    names = [*known, *(host for host in beats if host not in known)]
    return tuple(_host_row(name, known.get(name), beats.get(name), now) for name in names)


def _host_row(name: str, record: HostRecord | None, beat: Heartbeat | None, now: float) -> HostRow:
    progress = beat.progress if beat else None
    return HostRow(
        host=name,
        hostname=record.hostname if record else "",
        pid=record.pid if record else None,
        phase=progress.phase if progress else None,
        step=progress.step if progress else None,
        age_s=max(0.0, now - progress.time_s) if progress else None,
        exit_code=record.exit_code if record else None,
        reason=record.reason if record else "",
    )


def _failure(end: AttemptEnd | None, records: Sequence[HostRecord]) -> FailureRow | None:
    """From the attempt's end or, when its launcher died first, from the host that ended first."""
    fine = (None, ExitCode.COMPLETE, ExitCode.PREEMPTED)
    if end is not None:
        if end.exit_code in fine:
            return None
        return FailureRow(host=end.first_failing_host, message=end.message, hint=end.hint)
    failed = [record for record in records if record.exit_code not in fine]
    first = min(failed, key=lambda record: (record.collateral, record.end_s or 0.0), default=None)
    return FailureRow(host=first.host, message=first.reason, hint=first.hint) if first else None
