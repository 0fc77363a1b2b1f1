"""Supervising one run in the foreground: what ``launch --wait`` and ``supervise RUN`` share."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator

from launcher import lease
from launcher.cli import output
from launcher.cli.interrupts import INTERRUPTED
from launcher.cli.places import Places
from launcher.cost import per_hour, spent
from launcher.display import Display, open_display
from launcher.lease_keeper import LeaseKeeper
from launcher.rundir import RunDir, committed_step
from launcher.standing import is_zone
from launcher.storage import StorageError
from launcher.supervise.actions import Finish, Wait
from launcher.supervise.observation import Observation
from launcher.supervise.one import Supervised, supervised
from recipes.contract import ExitCode, RunPath, host_name

ALL_HOSTS = 32
"""With more hosts only process 0 is read for the status line."""
BEATS_PERIOD_S = 2.0


@contextlib.contextmanager
def held(run: RunDir, what: str) -> Iterator[LeaseKeeper]:
    """The right to get machines for a run, inside.

    Raises:
      LeaseHeld: somebody else supervises it.
    """
    try:
        keeper = LeaseKeeper(run, lease.this_process(what), RunPath.SUPERVISOR)
        keeper.take()
    except lease.LeaseHeld as error:
        error.message = f"{run.url} is supervised by {error.lease.holder()}"
        error.hint = "nothing more is needed: `muster status` shows how it goes on"
        raise
    with keeper:
        yield keeper


def check(keeper: LeaseKeeper) -> None:
    """Raises UserError when another process has taken over."""
    if keeper.lost is not None:
        raise keeper.lost


class Foreground:
    """One run, supervised in a terminal until it ends."""

    def __init__(self, run: RunDir, keeper: LeaseKeeper, places: Places, display: Display) -> None:
        self._run, self._display = run, display
        self.one: Supervised = supervised(run, places)
        self._supervisor = self.one.supervisor(
            say=display.say, may_act=lambda: check(keeper), sleep=self._sleep, forget=places.forget
        )

    @property
    def observation(self) -> Observation | None:
        """What was seen last."""
        return self._supervisor.observation

    def follow(self) -> Finish:
        """To the run's end."""
        finish = self._supervisor.run()
        assert finish is not None
        return finish

    def step(self) -> Finish | Wait | None:
        """One look and what follows from it."""
        return self._supervisor.step()

    def _sleep(self, seconds: float) -> None:
        """Shows how the attempt gets on meanwhile."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._show()
            time.sleep(min(left_s, BEATS_PERIOD_S))

    def _show(self) -> None:
        seen = self.observation
        if seen is None or seen.attempt is None:
            return
        only = None if len(seen.attempt.hosts) <= ALL_HOSTS else [host_name(0, 0)]
        # The bucket may be away: the line then stays as it was.
        with contextlib.suppress(StorageError):
            beats = self._run.heartbeats(only=only)
            number = seen.attempt.attempt
            self._display.show(number, [beat for beat in beats if beat.attempt == number])


def supervise_here(run: RunDir, what: str, *, as_json: bool, again: str = "") -> int:
    """Supervises a run to its end and reports; gives the exit code."""
    places = Places()
    with held(run, what) as keeper, open_display() as display:
        foreground = Foreground(run, keeper, places, display)
        try:
            finish = foreground.follow()
        except KeyboardInterrupt:
            finish = None
    if finish is None:
        for line in left_behind(run, foreground.observation):
            output.say(line)
        return INTERRUPTED
    report(run, finish, as_json=as_json, again=again)
    return int(finish.exit_code)


def left_behind(run: RunDir, seen: Observation | None) -> list[str]:
    """What goes on without this process, what it costs, and how to stop it.

    Args:
      run: the run.
      seen: the last look; None when there was none.
    """
    name, address = run.url.rpartition("/")[2], shlex.quote(run.url)
    lines = [f"{name}: no longer supervised from here"]
    for there in seen.machines if seen else ():
        lines.append(f"  stays there  {there.name} in {there.place} ({there.state})")
    if seen and (price := per_hour(seen.provisions)):
        lines.append(f"  costs        USD {price:,.2f} an hour until it is deleted")
    if seen and any(not is_zone(there.place) for there in seen.machines):
        lines.append(
            "  meanwhile    JobSet restarts it; nobody heeds its deadline or cost, or changes its slices"
        )
    elif seen and seen.machines:
        lines.append("  meanwhile    nobody brings it back after a preemption, or removes it at the end")
    else:
        lines.append("  meanwhile    no machines are asked for")
    return [
        *lines,
        f"  go on        muster supervise {address}",
        f"  stop         muster stop {address}",
    ]


def report(run: RunDir, finish: Finish, *, as_json: bool, again: str) -> None:
    """How it ended."""
    name = run.url.rpartition("/")[2]
    cost, saved = None, -1
    # A store that is away must not hide how the run ended.
    with contextlib.suppress(StorageError):
        cost, saved = spent(run.provisions(), time.time()), committed_step(run.storage)
    if as_json:
        output.data_json(
            {
                "run": name,
                "exit_code": int(finish.exit_code),
                "outcome": finish.exit_code.name.lower(),
                "reason": finish.reason,
                "hint": finish.hint,
                "host": finish.host or None,
                "committed_step": saved,
                "spent_usd": cost,
                "directory": run.url,
            }
        )
    if finish.exit_code in (ExitCode.COMPLETE, ExitCode.PREEMPTED):
        kept = "" if saved < 0 else f"; saved at step {saved}"
        output.say(f"{name}: {finish.reason}{kept}")
    else:
        output.error(f"{name}: {finish.reason}", finish.hint)
        output.say(f"  read logs    muster logs {shlex.quote(run.url)}")
    if cost:
        output.say(f"  spent        USD {cost:,.2f}")
    if any(limit in finish.reason for limit in ("run.deadline=", "run.max_cost=")):
        output.say("to go on, launch again with a later run.deadline or a larger run.max_cost, or with null")
    elif again and finish.exit_code != ExitCode.COMPLETE:
        then = "resume with" if finish.exit_code == ExitCode.PREEMPTED else "once that is mended"
        output.say(f"{then}: {again}")
