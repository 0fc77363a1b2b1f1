"""One process over all runs of a folder: cheap looks at all, and a lease only where something is to be done.

Most runs need nothing most of the time, so a pass over them costs a handful of list calls. Where ``decide``
wants more than to wait, the run's supervisor lease is taken, everything is read again, decided again, and
done; then the lease is let go. A run that somebody supervises in the foreground is left to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher import lease
from launcher.rundir import RunDir
from launcher.storage_types import Storage
from launcher.supervise.actions import Finish, Wait
from launcher.supervise.decide import decide
from launcher.supervise.fleet import Fleet, RunFacts
from launcher.supervise.one import Places, Supervised, look_at, of_facts
from recipes.contract import RunPath
from recipes.errors import UserError

MAX_STEPS = 20
"""Actions in a row for one run; the others must not wait for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one pass over all runs came to."""

    num_runs: int
    """That have an order."""
    num_acted: int
    waits: Mapping[str, str]
    """Why, by run."""
    problems: Mapping[str, str]
    """What kept a run from being looked at or acted on."""


class Overseer:
    """Supervises every run of one root."""

    def __init__(
        self,
        root: Storage,
        places: Places,
        *,
        begin_pass: Callable[[], None],
        say: Callable[[str], None],
        what: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """See the class.

        Args:
          root: the folder of all runs.
          places: gives the place of a run's machines.
          begin_pass: forgets what was listed before.
          say: takes one line of news.
          what: this process, for people who meet its leases.
          now: Unix time.
        """
        self._root, self._places, self._begin_pass = root, places, begin_pass
        self._say, self._what, self._now = say, what, now
        self._fleet = Fleet(root, None)
        self._known: dict[str, Supervised] = {}
        self._told: dict[str, str] = {}

    def once(self) -> Pass:
        """One pass."""
        self._begin_pass()
        self._fleet.refresh(self._now())
        acted, waits, problems = 0, dict[str, str](), dict[str, str]()
        runs = self._fleet.runs()
        for facts in runs:
            try:
                waits[facts.name], did = self._look_at(facts)
                acted += did
            except UserError as error:
                problems[facts.name] = f"{error.message}; {error.hint}" if error.hint else error.message
        for name, text in problems.items():
            self._tell(name, text)
        self._known = {facts.name: self._known[facts.name] for facts in runs if facts.name in self._known}
        return Pass(num_runs=len(runs), num_acted=acted, waits=waits, problems=problems)

    def _look_at(self, facts: RunFacts) -> tuple[str, bool]:
        """Why it waits, and whether something was done."""
        one = self._supervised(facts)
        if not _needs_watching(one):
            return "JobSet restarts it, and it has no limits to watch", False
        if facts.supervisor is not None:
            return f"supervised by {facts.supervisor.holder()}", False
        first = decide(one.wanted, look_at(facts, one.place), self._now())
        idle = [action for action in first if isinstance(action, Wait | Finish)]
        if len(idle) == len(first):
            return _why(idle[-1]), False
        return self._act(one), True

    def _supervised(self, facts: RunFacts) -> Supervised:
        known = self._known.get(facts.name)
        if known is None or facts.order is None or known.wanted.order.id != facts.order.id:
            known = of_facts(RunDir(self._root.child(facts.name)), facts, self._places)
            self._known[facts.name] = known
        return known

    def _act(self, one: Supervised) -> str:
        """Under the run's lease and on a look of its own."""
        owner = lease.this_process(self._what)
        held = one.run.acquire(owner, self._now(), RunPath.SUPERVISOR)
        name = one.wanted.run
        try:
            supervisor = one.supervisor(
                say=lambda text: self._say(f"{name}: {text}"),
                may_act=lambda: _still_held(held, self._now()),
                now=self._now,
                forget=self._begin_pass,
            )
            for _ in range(MAX_STEPS):
                result = supervisor.step()
                if isinstance(result, Finish):
                    self._tell(name, f"ended: {result.reason}")
                if result is not None:
                    return _why(result)
            return "there is more to do"
        finally:
            one.run.release(held)

    def _tell(self, name: str, text: str) -> None:
        """Once, until it is something else."""
        if self._told.get(name) != text:
            self._told[name] = text
            self._say(f"{name}: {text}")


def _why(result: Wait | Finish) -> str:
    return result.why if isinstance(result, Wait) else result.reason


def _needs_watching(one: Supervised) -> bool:
    """JobSet brings a run back by itself; only limits and missing slices need somebody."""
    wanted = one.wanted
    limited = wanted.deadline_s is not None or wanted.max_cost_usd is not None
    return not wanted.restarts_itself or wanted.is_elastic or limited


def _still_held(held: lease.Held, now: float) -> None:
    """Raises UserError when the lease is too old to act under: somebody else may hold it by now."""
    if now > held.lease.expires_s - lease.CLOCK_SKEW_S:
        raise UserError("this took longer than the lease lasts", hint="the next pass goes on")
