"""What a run is doing now, from its run directory alone: what ``muster ls`` and ``status`` show."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher import lease
from launcher.books import Books, Pace, cost_of, read_books
from launcher.cost import Cost
from launcher.ledger import AttemptEnd, Damaged, Heartbeat, HostRecord, StopRequest
from launcher.rundir import DamagedRecipe, RunDir, committed_step
from launcher.standing import Standing, is_zone, standing
from launcher.storage_types import Names
from launcher.supervise.records import TERMINAL, Provision
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
    WAITING = "waiting"
    """Machines are asked for, or about to be."""
    STARTING = "starting"
    """Its machines are up and no attempt is under way yet."""


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
    cost: Cost
    machines: Standing
    supervisor: str | None
    """Who gets machines for it."""
    is_abandoned: bool
    """It needs a supervisor and has none: nobody brings it back or removes its machines."""


def plain(seen: RunSummary) -> dict[str, object]:
    """As one flat object of JSON, but for the hosts and the failure."""
    whole = dataclasses.asdict(seen)
    whole |= whole.pop("cost") | whole.pop("machines")
    return whole


def summary(
    run: RunDir,
    now: float,
    *,
    all_hosts: bool = False,
    stand_in: Recipe | None = None,
    overseer: str | None = None,
) -> RunSummary:
    """Reads the run.

    Args:
      run: where it is.
      now: Unix time.
      all_hosts: read every host, however many there are.
      stand_in: another copy of the recipe. With it a damaged recipe or lease is named and passed over.
      overseer: who supervises all runs of the folder.

    Raises:
      NotFound: there is no run here.
      UserError: the recipe or the lease is damaged; the message names it.
    """
    damaged: Names = []
    recipe = _recipe(run, stand_in, damaged)
    newest = _newest(run, damaged, all_hosts=all_hosts)
    end, beats = newest.end, newest.beats
    holder = _holder(run, damaged, refuse=stand_in is None)
    held = lease.is_held(holder, now)
    committed, metrics = committed_step(run.storage), _metrics(beats)
    books = read_books(run, now, damaged, overseer)
    step = max([committed, 0, *(beat.progress.step for beat in beats.values())])
    state = _state(run, newest, books, held=held)
    is_done = state is RunState.COMPLETE
    pace = _pace(newest, metrics, held=held, steps_left=0 if is_done else recipe.train.num_steps - step)
    return RunSummary(
        name=run_name(run.url),
        url=run.url,
        state=state,
        step=step,
        num_steps=recipe.train.num_steps,
        committed_step=committed,
        loss=metrics.get("train/loss"),
        eval_loss=metrics.get("eval/loss"),
        eval_unigram_entropy_nats=metrics.get("data/eval_unigram_entropy_nats"),
        step_time_s=pace.step_time_s,
        tokens_per_s=metrics.get("perf/tokens_per_s"),
        attempts=len(newest.attempts),
        holder=holder.holder() if holder and held else None,
        updated_s=pace.beat_s,
        num_hosts=newest.num_hosts,
        hosts=_host_rows(newest.records, beats, now),
        failure=_failure(end, newest.records),
        logs=f"{run.url}/{RunPath.ATTEMPTS}/{newest.attempts[-1]:04d}/logs" if newest.attempts else None,
        cost=cost_of(run, stand_in or recipe, books, pace, now),
        machines=standing(books.provisions, now, is_supervised=books.supervisor is not None),
        supervisor=books.supervisor,
        is_abandoned=_is_abandoned(books, state, stand_in),
        damaged=tuple(damaged),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Newest:
    """All attempts, and what is known of the newest."""

    attempts: Sequence[int]
    end: AttemptEnd | None
    records: Sequence[HostRecord]
    beats: Mapping[str, Heartbeat]
    num_hosts: int


def _newest(run: RunDir, damaged: Names, *, all_hosts: bool) -> _Newest:
    attempts = run.attempts()
    attempt = attempts[-1] if attempts else 0
    end = run.attempt_end(attempt, damaged) if attempt else None
    times = run.beat_times()
    only = None if all_hosts or len(times) <= MANY_HOSTS else hosts_that_matter(times, end)
    records = run.hosts(attempt, damaged, only=only) if attempt else ()
    read = run.heartbeats(damaged, only=only or times)
    return _Newest(
        attempts=attempts,
        end=end,
        records=records,
        beats={beat.host: beat for beat in read if beat.attempt == attempt},
        num_hosts=len(times),
    )


def _pace(newest: _Newest, metrics: Mapping[str, float], *, held: bool, steps_left: int) -> Pace:
    return Pace(
        attempts=newest.attempts,
        is_held=held,
        beat_s=max((beat.progress.time_s for beat in newest.beats.values()), default=None),
        steps_left=steps_left,
        step_time_s=metrics.get("perf/step_time_s"),
    )


def _state(run: RunDir, newest: _Newest, books: Books, *, held: bool) -> RunState:
    return run_state(
        held=held,
        attempts=len(newest.attempts),
        end=newest.end,
        stop=run.stop_request(),
        provisions=books.provisions,
        supervised=books.supervisor is not None,
    )


def _is_abandoned(books: Books, state: RunState, recipe: Recipe | None) -> bool:
    """JobSets restart by themselves; TPU VMs do not."""
    if not books.has_order or books.supervisor is not None:
        return False
    is_there = any(each.ended_s is None for each in books.provisions)
    on_vms = any(is_zone(each.place) for each in books.provisions[-1:]) or (
        recipe is not None and recipe.target.kind == "tpu"
    )
    over = (RunState.COMPLETE, RunState.STOPPED, RunState.FAILED)
    return on_vms and (is_there or state not in over)


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


def run_state(
    *,
    held: bool,
    attempts: int,
    end: AttemptEnd | None,
    stop: StopRequest | None,
    provisions: Sequence[Provision] = (),
    supervised: bool = False,
) -> RunState:
    """The state, from who holds the leases, how the newest attempt ended and what machines there are."""
    if end is not None and end.exit_code == ExitCode.COMPLETE:
        return RunState.COMPLETE
    if held:
        return RunState.RUNNING
    # The supervisor's own request, to change machines, ends nothing.
    is_asked = stop is not None and not stop.resumes
    if not is_asked and (coming := _coming(end, provisions, supervised=supervised)) is not None:
        return coming
    if attempts == 0 or end is None:
        # A host that is asked to stop before it began, or is ended after its grace, leaves no record.
        if is_asked:
            return RunState.STOPPED
        return RunState.CREATED if attempts == 0 else RunState.STALE
    if end.exit_code == ExitCode.PREEMPTED:
        return RunState.STOPPED if is_asked else RunState.PREEMPTED
    return RunState.FAILED


def _coming(end: AttemptEnd | None, provisions: Sequence[Provision], *, supervised: bool) -> RunState | None:
    """Of a run that nobody has stopped and whose hosts are not at work; None: nothing is coming."""
    newest = next((each for each in reversed(provisions) if not each.is_probe), None)
    if newest is not None and newest.ended_s is None:
        is_up = newest.ready_s is not None and newest.trouble is None
        return RunState.STARTING if is_up else RunState.WAITING
    has_failed = end is not None and end.exit_code != ExitCode.PREEMPTED
    if newest is not None and newest.trouble in TERMINAL:
        return RunState.FAILED
    return RunState.WAITING if supervised and not has_failed else None


def _metrics(beats: Mapping[str, Heartbeat]) -> Mapping[str, float]:
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
