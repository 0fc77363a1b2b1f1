"""Removing the TPU VMs of a run that was asked to stop: by its supervisor or, without one, from here.

The supervisor's own loop does it, so it waits for the last checkpoint and keeps the books.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.places import Places
from launcher.cli.supervising import check, held
from launcher.cost import per_hour
from launcher.lease import LeaseHeld
from launcher.rundir import RunDir
from launcher.standing import open_provisions, short_place
from launcher.supervise.one import Supervised, supervised
from recipes.contract import ExitCode
from recipes.errors import UserError

DELETION_S = 600.0
"""How long the service may take to remove machines, after the run's grace period."""
POLL_S = 2.0


def remove_machines(
    run: RunDir,
    timeout_s: float | None,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Until nothing is left; the request to stop has been written.

    Args:
      run: whose machines they are.
      timeout_s: how long that may take; None: the grace period, and what deletions take.
      say: takes one line of news.
      sleep: waits.
      monotonic: seconds of a clock that only goes forward.

    Raises:
      UserError: something is left; the message says what, and what it costs.
    """
    places = Places()
    one = supervised(run, places)
    wait_s = one.wanted.grace_period_s + DELETION_S if timeout_s is None else timeout_s
    deadline_s = monotonic() + wait_s

    def pause(seconds: float) -> None:
        sleep(min(seconds, max(0.0, deadline_s - monotonic())))

    say(f"asked {one.wanted.run} to stop; waiting for its last checkpoint and the removal of its machines")
    try:
        _see_removed(run, one, places, say=say, pause=pause, left_s=lambda: deadline_s - monotonic())
    except KeyboardInterrupt:
        raise _left(run, "no longer waited for", INTERRUPTED) from None
    if open_provisions(run):
        raise _left(run, f"after {wait_s:g} s", ExitCode.INFRASTRUCTURE)


def _see_removed(
    run: RunDir,
    one: Supervised,
    places: Places,
    *,
    say: Callable[[str], None],
    pause: Callable[[float], None],
    left_s: Callable[[], float],
) -> None:
    told = ""
    while open_provisions(run) and left_s() > 0:
        try:
            with held(run, "muster stop") as keeper:
                supervisor = one.supervisor(
                    say=say,
                    may_act=partial(check, keeper),
                    sleep=pause,
                    period_s=POLL_S,
                    forget=places.forget,
                )
                supervisor.run(until=lambda: left_s() <= 0)
        except LeaseHeld as error:
            if told != (holder := error.lease.holder()):
                told = holder
                say(f"{holder} supervises it and removes them")
            pause(POLL_S)


def _left(run: RunDir, when: str, exit_code: int) -> UserError:
    left = open_provisions(run)
    names = ", ".join(f"{each.name} in {short_place(each.place)}" for each in left) or "something"
    price = per_hour(left)
    cost = f", at USD {price:,.2f} an hour" if price else ""
    return UserError(
        f"{names} may still be there {when}{cost}",
        hint="the request stays: `muster stop` again goes on waiting, `muster status` shows how it is",
        exit_code=exit_code,
    )
