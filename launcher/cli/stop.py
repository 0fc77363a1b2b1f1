"""``muster stop RUN``: ask whoever runs it to save, stop and let go, and wait until they have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import click

from launcher import lease
from launcher.cli import output, runs
from launcher.gke.client import Cluster, connect
from launcher.gke.objects import Object, uid
from launcher.gke.of_run import own_jobset, targets_of
from launcher.gke.stopping import stop_jobset
from launcher.gke.submit import is_over
from launcher.ledger import Damaged, Heartbeat
from launcher.rundir import RunDir
from launcher.standing import is_on_vms, open_provisions
from launcher.storage import StorageError, is_remote
from launcher.summary import RunState, RunSummary, run_name, summary
from recipes.contract import ExitCode
from recipes.errors import UserError
from recipes.schema_target import TargetConfig

DEFAULT_TIMEOUT_S = 120.0
POLL_S = 0.5


@click.command()
@runs.run_argument
@runs.root_option
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0.0),
    show_default=f"{DEFAULT_TIMEOUT_S:g}, on a cluster or TPU VMs more",
    help="How long to wait; the request stays.",
)
def command(run: str, root: str, timeout_s: float | None) -> None:
    """Stop RUN (a name, a path or a gs:// address) cleanly; launching it again resumes it.

    On a cluster its JobSet is deleted, on TPU VMs the machines; that nothing of them is left is checked.
    """
    found = runs.find_run(run, root)
    was_there = _stop_on_clusters(found, timeout_s) or _stop_on_vms(found, timeout_s)
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    # Also after a JobSet is gone: another one, which no launch recorded, may hold the lease.
    was_held = stop(found, wait_s, time.sleep, time.time)
    seen = summary(found, time.time())
    if seen.state is RunState.RUNNING:
        raise _running_again(seen)
    output.say(
        _ended(seen) if was_there or was_held else f"{seen.name} is not running: it is {seen.state.value}"
    )


def _stop_on_clusters(run: RunDir, timeout_s: float | None) -> bool:
    """Wherever a launch was recorded; False when no cluster runs it.

    Raises:
      UserError: the JobSet of that name is another's, or something of it is left after ``timeout_s``.
    """
    living = _living(run) if is_remote(run.url) else ()
    for target, cluster, jobset in living:
        _ask(run, time.time())
        wait_s = target.grace_period_s + DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        stop_jobset(cluster, jobset, wait_s, say=output.say)
        # Pods that were ended after their grace period could not let it go; a damaged one is told of later.
        with contextlib.suppress(Damaged):
            lease.release_of(run.storage, lease.job_owner(uid(jobset)))
    return bool(living)


def _living(run: RunDir) -> Sequence[tuple[TargetConfig, Cluster, Object]]:
    """The run's JobSets that are not over. Older places than the newest may be gone or be others' by now."""
    found: dict[str, tuple[TargetConfig, Cluster, Object]] = {}
    clusters = [target for target in targets_of(run) if target.kind == "gke"]
    for number, target in enumerate(clusters):
        try:
            cluster = connect(target.cluster, target.namespace)
            jobset = own_jobset(cluster, run, run_name(run.url))
        except UserError as error:
            if number == 0:
                raise
            output.note(f"where it was launched earlier: {error.message}")
            continue
        if jobset is not None and not is_over(jobset):
            found.setdefault(uid(jobset), (target, cluster, jobset))
    return list(found.values())


def _stop_on_vms(run: RunDir, timeout_s: float | None) -> bool:
    """Removes the run's TPU VMs once it has saved; False when it was launched onto none, or all are gone.

    Raises:
      UserError: some are left after ``timeout_s``.
    """
    if not is_remote(run.url) or run.order() is None or not is_on_vms(run):
        return False
    before = run.stop_request()
    is_asked = before is not None and not before.resumes
    if not is_asked and summary(run, time.time()).state is not RunState.COMPLETE:
        # Also while there are no machines: a supervisor may be about to ask for some.
        _ask(run, time.time())
    if not open_provisions(run):
        return False
    from launcher.cli.stopping_vms import remove_machines

    remove_machines(run, timeout_s, say=output.say)
    return True


def stop(run: RunDir, timeout_s: float, sleep: Callable[[float], None], now: Callable[[], float]) -> bool:
    """Asks and waits; False when nobody acts on the run.

    Raises:
      UserError: it still runs after ``timeout_s``, or nobody can tell; the request stays.
    """
    try:
        holder = lease.read(run.storage)
    except StorageError:
        _ask(run, now())
        raise
    if holder is None or not lease.is_held(holder, now()):
        return False
    _ask(run, now())
    output.say(f"asked {holder.holder()} to stop; waiting for its last checkpoint")
    deadline_s = now() + timeout_s
    told = ""
    while lease.is_held(current := lease.read(run.storage), now()):
        if now() >= deadline_s:
            raise _still_running(run, current or holder, timeout_s)
        if (line := _where(run)) != told:
            told = line
            output.say(line)
        sleep(POLL_S)
    return True


def _ask(run: RunDir, now: float) -> None:
    asked = run.stop_request()
    # The supervisor's own request, to change machines, ends nothing.
    if asked is None or asked.resumes:
        run.request_stop(now, runs.asker())


def _where(run: RunDir) -> str:
    beats: Sequence[Heartbeat] = ()
    with contextlib.suppress(StorageError):
        beats = run.heartbeats()
    newest = max(beats, key=lambda beat: beat.progress.time_s, default=None)
    return (
        f"{newest.host}: {newest.progress.phase.value}, step {newest.progress.step}"
        if newest
        else "no host yet"
    )


def _ended(seen: RunSummary) -> str:
    saved = "no checkpoint" if seen.committed_step < 0 else f"checkpoint at step {seen.committed_step}"
    again = "" if seen.state is RunState.COMPLETE else "; launch it again to resume"
    return f"{seen.name} is {seen.state.value}: {saved}{again}"


def _running_again(seen: RunSummary) -> UserError:
    return UserError(
        f"{seen.name} is running, held by {seen.holder}: it was launched anew",
        hint="`muster status` shows it; `muster stop` again stops that one",
        exit_code=ExitCode.INFRASTRUCTURE,
    )


def _still_running(run: RunDir, holder: lease.Lease, timeout_s: float) -> UserError:
    return UserError(
        f"{run.url} still runs after {timeout_s:g} s, held by {holder.holder()}",
        hint="the request stays: wait with `muster stop` again, or end that process",
        exit_code=ExitCode.INFRASTRUCTURE,
    )
