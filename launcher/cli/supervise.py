"""``muster supervise``: keep runs going that were launched onto TPU VMs or a cluster."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import click

from launcher import lease
from launcher.cli import output, runs
from launcher.cli.interrupts import INTERRUPTED
from launcher.storage import Storage, Unavailable, is_remote, open_storage
from recipes.contract import ExitCode
from recipes.errors import UserError

PASS_PERIOD_S = 15.0
STANDBY_S = 20.0


@click.command()
@click.argument("run", required=False, shell_complete=runs.complete_run)
@runs.root_option
@click.option("--all", "everything", is_flag=True, help="Every run under --root, until stopped.")
@click.option("--once", is_flag=True, help="With --all: one pass, then end.")
@click.option("--json", "as_json", is_flag=True, help="How it ended, as JSON on stdout.")
def command(run: str | None, root: str, everything: bool, once: bool, as_json: bool) -> None:
    """Get machines for RUN, bring it back after preemptions, and remove them at its end.

    Ended anywhere, it can be started again anywhere: it goes on from the bucket and the cloud.
    """
    if everything == (run is not None):
        raise click.UsageError("give a RUN, or --all for every run under --root")
    if once and not everything:
        raise click.UsageError("--once is for --all")
    ctx = click.get_current_context()
    if run is not None:
        from launcher.cli.supervising import supervise_here

        found = runs.find_run(run, root)
        ctx.exit(supervise_here(found, f"muster supervise {run}", as_json=as_json))
    storage = open_storage(root)
    if not is_remote(root) and not os.path.isdir(storage.url):
        raise UserError(
            f"there is no folder {storage.url}",
            hint=f"give the folder of all runs: --root, {runs.ROOT_VARIABLE}",
        )
    ctx.exit(_supervise_all(storage, once=once, as_json=as_json))


def _supervise_all(root: Storage, *, once: bool, as_json: bool) -> int:
    from launcher.cli.places import Places
    from launcher.supervise.fleet_loop import Overseer

    signal.signal(signal.SIGTERM, _interrupt)
    places, what = Places(), "muster supervise --all"
    overseer = Overseer(root, places, begin_pass=places.forget, say=output.say, what=what)
    try:
        held = _root_lease(root, what, wait=not once)
        try:
            told = -1
            while True:
                done = overseer.once()
                if done.num_runs != told:
                    told = done.num_runs
                    output.say(f"supervising {told} run{'' if told == 1 else 's'} of {root.url}")
                if as_json:
                    output.data_json(
                        {
                            "runs": done.num_runs,
                            "acted": done.num_acted,
                            "waits": done.waits,
                            "problems": done.problems,
                        },
                        indent=None,
                    )
                if once:
                    return ExitCode.INFRASTRUCTURE if done.problems else ExitCode.COMPLETE
                time.sleep(PASS_PERIOD_S)
                held = _renewed(root, held)
        finally:
            lease.release(root, held)
    except KeyboardInterrupt:
        output.say(f"no longer supervising {root.url}: its runs go on, and nobody brings them back")
        output.say(f"  go on        muster supervise --all --root {root.url}")
        return INTERRUPTED


def _root_lease(root: Storage, what: str, *, wait: bool) -> lease.Held:
    """The right to supervise all runs; a second process stands by."""
    owner, told = lease.this_process(what), ""
    while True:
        try:
            return lease.acquire(root, owner, time.time(), runs.OVERSEER)
        except lease.LeaseHeld as error:
            holder = error.lease.holder()
            if not wait:
                raise UserError(
                    f"{root.url} is supervised by {holder}",
                    hint="nothing more is needed; without --once this waits until that one ends",
                    exit_code=ExitCode.INFRASTRUCTURE,
                ) from error
            if told != holder:
                output.say(f"{root.url} is supervised by {holder}; standing by")
                told = holder
            time.sleep(STANDBY_S)


def _renewed(root: Storage, held: lease.Held) -> lease.Held:
    try:
        return lease.renew(root, held, time.time())
    except Unavailable:
        # Runs have leases of their own; this one only keeps a second process out of the way.
        return held


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
