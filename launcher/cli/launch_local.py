"""``muster launch RECIPE`` on this machine: attempts until the run has ended, and how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from launcher import lease
from launcher.backends.local import LocalBackend, LocalShape
from launcher.cli import output, runs
from launcher.display import open_display
from launcher.lease_keeper import LeaseKeeper
from launcher.lookout import Lookout
from launcher.plan import Plan
from launcher.provenance import lock_info
from launcher.restarts import Asked, Finish, Supervisor
from launcher.rundir import RunDir, committed_step, create_or_open
from launcher.storage import StorageError, open_storage
from launcher.summary import RunSummary, summary
from launcher.supervise.limits import refuse_passed_deadline
from recipes.contract import ExitCode, Fork, RunPath, attempt_path
from recipes.schema import Recipe

STOP_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal is gone"}


def launch(
    recipe: Recipe, plan: Plan, *, restart_allowed: bool, what: str, fork: Fork | None = None
) -> Finish:
    """Runs attempts of a local run until it is complete, stopped or beyond help.

    Raises:
      UserError: the run directory refuses: another experiment, in use, not writable; or the deadline passed.
    """
    refuse_passed_deadline(recipe, time.time())
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    lock = lock_info(plan_sha256=digest, folder=Path.cwd())
    opened = create_or_open(open_storage(recipe.run_dir), recipe, lock, fork=fork)
    for change in opened.changes:
        output.say(f"changed since this run began: {change.key}={change.new} ({change.effect})")
    run = opened.run
    with _stop_signals() as asked, LeaseKeeper(run, lease.this_process(what)) as keeper:
        if done := _complete(run):
            return done
        run.clear_stop()
        shape = LocalShape(
            num_slices=plan.hardware.num_slices,
            hosts_per_slice=plan.hardware.hosts_per_slice,
            devices_per_host=plan.hardware.devices_per_host,
            grace_period_s=recipe.target.grace_period_s,
            env=recipe.target.env,
        )
        output.say(f"{'new run' if opened.created else 'resuming'}: {run.url}")
        with open_display() as display, Lookout(run) as lookout:
            supervisor = Supervisor(
                run=run,
                recipe=recipe,
                backend=LocalBackend(run, shape, os.environ, display.say),
                watcher=display,
                asked=asked,
                lease_lost=lambda: keeper.lost,
                look=lookout.seen,
                restart_allowed=restart_allowed,
            )
            finish = supervisor.run(shape.hosts, lock)
        if asked.count:
            # So that `muster status` calls it stopped; the next launch removes it.
            with contextlib.suppress(StorageError):
                run.request_stop(time.time(), asked.by)
        return finish


def _complete(run: RunDir) -> Finish | None:
    """What to say of a run that needs no attempt any more."""
    damaged: list[str] = []
    ends = {attempt: run.attempt_end(attempt, damaged) for attempt in run.attempts()}
    for problem in damaged:
        output.note(f"{problem}; how that attempt ended is unknown")
    done = [attempt for attempt, end in ends.items() if end and end.exit_code == ExitCode.COMPLETE]
    if not done:
        return None
    return Finish(
        exit_code=ExitCode.COMPLETE,
        reason="complete already",
        hint="",
        host="",
        attempt=done[-1],
        num_attempts=0,
        committed_step=committed_step(run.storage),
    )


@contextlib.contextmanager
def _stop_signals() -> Iterator[Asked]:
    """Signals that ask for a stop, counted while inside."""
    asked = Asked()

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.ask(STOP_SIGNALS[signal.Signals(number)])

    # What is ignored stays ignored: nohup and shells that start jobs in the background mean it.
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(plan: Plan, finish: Finish, *, again: str, as_json: bool) -> None:
    url, learned = open_storage(plan.run_dir).url, None
    # A store that is away must not hide how the run ended.
    with contextlib.suppress(StorageError):
        learned = summary(RunDir(open_storage(plan.run_dir)), time.time())
    places = {
        "checkpoints": f"{url}/{RunPath.CHECKPOINTS}",
        "metrics": f"{url}/{RunPath.METRICS}",
        "logs": f"{url}/{attempt_path(finish.attempt)}/logs",
    }
    if as_json:
        output.data_json(_to_json(plan, finish, learned, {"directory": url, **places}))
    if finish.exit_code == ExitCode.COMPLETE:
        output.say(f"{plan.run_name}: {finish.reason}, {plan.batch.num_steps} steps")
    elif finish.exit_code == ExitCode.PREEMPTED:
        output.say(f"{plan.run_name}: {finish.reason}; {_saved(finish)}")
    else:
        output.error(f"{plan.run_name}: {finish.reason}", finish.hint)
    if learned and (losses := runs.learned(learned)):
        output.say(f"  {losses}")
    for name, place in places.items():
        output.say(f"  {name:<12} {place}")
    for line in _next(url, finish, again):
        output.say(line)


def _saved(finish: Finish) -> str:
    return "nothing was saved" if finish.committed_step < 0 else f"saved at step {finish.committed_step}"


def _next(url: str, finish: Finish, again: str) -> Sequence[str]:
    """What to type next."""
    address = shlex.quote(url)
    lines = [
        f"  status       muster status {address}",
        f"  tensorboard  tensorboard --logdir {address}/metrics",
    ]
    if finish.exit_code == ExitCode.COMPLETE:
        return lines
    host = f" --host {finish.host}" if finish.host and finish.exit_code != ExitCode.PREEMPTED else ""
    users_turn = finish.exit_code in (ExitCode.EXPERIMENT_FAILED, ExitCode.BAD_INPUT)
    then = "once that is mended" if users_turn else "resume with"
    return [f"  read log     muster logs {address}{host}", *lines[:1], f"{then}: {again}"]


def _to_json(
    plan: Plan, finish: Finish, learned: RunSummary | None, places: Mapping[str, str]
) -> dict[str, object]:
    return {
        "run": plan.run_name,
        "exit_code": int(finish.exit_code),
        "outcome": finish.exit_code.name.lower(),
        "reason": finish.reason,
        "hint": finish.hint,
        "host": finish.host or None,
        "attempt": finish.attempt,
        "num_attempts": finish.num_attempts,
        "committed_step": finish.committed_step,
        "loss": learned.loss if learned else None,
        "eval_loss": learned.eval_loss if learned else None,
        "eval_unigram_entropy_nats": learned.eval_unigram_entropy_nats if learned else None,
        **places,
    }
