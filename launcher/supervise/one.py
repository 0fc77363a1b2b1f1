"""Everything that supervising one run takes, put together from its run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from launcher.rundir import RunDir
from launcher.storage import open_storage
from launcher.supervise.fleet import Fleet, RunFacts, observation
from launcher.supervise.loop import PERIOD_S, Supervisor
from launcher.supervise.observation import Observation, Phase, Wanted
from launcher.supervise.place import Place
from launcher.supervise.wanted import wanted as wanted_of
from recipes.errors import UserError
from recipes.schema import Recipe

type Places = Callable[[RunDir, RunFacts, Recipe], Place]
"""Gives the place of a run's machines, by its target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """One run and what it is to be."""

    run: RunDir
    recipe: Recipe
    wanted: Wanted
    place: Place

    def supervisor(
        self,
        *,
        say: Callable[[str], None],
        may_act: Callable[[], None],
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        period_s: float = PERIOD_S,
        forget: Callable[[], None] = lambda: None,
    ) -> Supervisor:
        """The loop over this run alone.

        Args:
          say: takes one line of news.
          may_act: raises UserError when another process has taken over.
          now: Unix time.
          sleep: waits.
          period_s: between two looks while nothing happens.
          forget: called before each look: what the place shares with others is asked for anew.
        """
        fleet = reader(self.run)

        def observe() -> Observation:
            forget()
            fleet.refresh(now())
            facts = next(iter(fleet.runs()), None)
            if facts is None or facts.order is None or facts.order.id != self.wanted.order.id:
                raise replaced(self.run)
            return look_at(facts, self.place)

        return Supervisor(
            run=self.run,
            wanted=self.wanted,
            place=self.place,
            observe=observe,
            say=say,
            may_act=may_act,
            now=now,
            sleep=sleep,
            period_s=period_s,
        )


def look_at(facts: RunFacts, place: Place) -> Observation:
    """What there is of a run, now. Hosts are asked what they do only while nothing else tells."""
    look, is_silent = place.look(), facts.attempt is None and not facts.is_held
    asked = [each for each in look.machines if is_silent and each.phase is Phase.UP and not each.is_probe]
    return observation(facts, look, {each.name: place.words(each) for each in asked})


def supervised(run: RunDir, places: Places) -> Supervised:
    """A run as its newest order says.

    Raises:
      UserError: it has none, or something of it cannot be read.
    """
    fleet = reader(run)
    fleet.refresh(time.time())
    facts = next(iter(fleet.runs()), None)
    if facts is None:
        raise no_order(run)
    return of_facts(run, facts, places)


def of_facts(run: RunDir, facts: RunFacts, places: Places) -> Supervised:
    """A run as the fleet's reader found it.

    Raises:
      UserError: it has no order, or something that a decision depends on cannot be read.
    """
    if facts.unusable is not None:
        raise facts.unusable
    order, recipe = facts.order, facts.recipe
    if order is None or recipe is None:
        raise no_order(run)
    return Supervised(
        run=run,
        recipe=recipe,
        wanted=wanted_of(recipe, order, facts.name),
        place=places(run, facts, recipe),
    )


def reader(run: RunDir) -> Fleet:
    """The fleet's reader over one run."""
    root, _, name = run.url.rpartition("/")
    return Fleet(open_storage(root), [name])


def no_order(run: RunDir) -> UserError:
    """Of a run that nobody has to supervise."""
    return UserError(
        f"{run.url} was not launched onto TPU VMs or a cluster",
        hint="local runs are supervised by `muster launch` itself",
    )


def replaced(run: RunDir) -> UserError:
    """The order is not the one any more that this process carries out."""
    return UserError(
        f"{run.url} was launched anew; this process no longer supervises it",
        hint="`muster status` shows who does",
    )
