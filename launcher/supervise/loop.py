"""The thin loop around ``decide``: look, decide, act, over and over, for one run.

Nothing is kept here that a successor would miss: whatever happens between two actions, the next look at
bucket and cloud finds out. Each action is preceded by a check that this process may still act.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.rundir import RunDir
from launcher.supervise import closing
from launcher.supervise.actions import (
    Action,
    AskToStop,
    ClearStop,
    Close,
    Create,
    Delete,
    Finish,
    Note,
    Say,
    Wait,
)
from launcher.supervise.decide import decide
from launcher.supervise.observation import Observation, Wanted, is_of
from launcher.supervise.place import Place, Refusal
from launcher.supervise.records import Provision, Trouble

PERIOD_S = 10.0
"""Between two looks while nothing happens."""
NOT_SURE = (Trouble.UNAVAILABLE,)
"""Refusals after which the request may have been carried out all the same: the next look tells."""


class Supervisor:
    """Keeps one run going."""

    def __init__(
        self,
        *,
        run: RunDir,
        wanted: Wanted,
        place: Place,
        observe: Callable[[], Observation],
        say: Callable[[str], None],
        may_act: Callable[[], None],
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        period_s: float = PERIOD_S,
    ) -> None:
        """See the class.

        Args:
          run: where its books are.
          wanted: what is to be kept running.
          place: where its machines come from.
          observe: looks at bucket and place.
          say: takes one line of news.
          may_act: raises UserError when another process has taken over.
          now: Unix time.
          sleep: waits.
          period_s: between two looks while nothing happens.
        """
        self._run, self._wanted, self._place, self._observe = run, wanted, place, observe
        self._say, self._may_act, self._now, self._sleep = say, may_act, now, sleep
        self._period_s = period_s
        self._told: dict[str, None] = {}
        self._waits_for = ""
        self.observation: Observation | None = None
        """What the last look showed."""

    def run(self, *, until: Callable[[], bool] = lambda: False) -> Finish | None:
        """Goes on until the run needs no machines any more, or ``until`` says so (then None).

        Raises:
          UserError: another process has taken over, or bucket or cloud refuse for good.
        """
        while not until():
            result = self.step()
            if isinstance(result, Finish):
                return result
            if isinstance(result, Wait):
                self.pause(result)
        return None

    def pause(self, wait: Wait) -> None:
        """Until it is worth looking again."""
        self._sleep(self._pause_s(wait))

    def step(self) -> Finish | Wait | None:
        """One look and what follows from it; None when there may be more to do at once."""
        self.observation = self._observe()
        result: Finish | Wait | None = None
        for action in decide(self._wanted, self.observation, self._now()):
            if isinstance(action, Wait | Finish):
                result = action
            else:
                self._may_act()
                result = self._act(action) or result
        self._tell(result)
        return result

    def _pause_s(self, wait: Wait) -> float:
        if wait.until_s is None:
            return self._period_s
        return min(self._period_s, max(0.0, wait.until_s - self._now()) + 0.01)

    def _tell(self, result: Finish | Wait | None) -> None:
        """Why it waits, when that has changed."""
        if isinstance(result, Wait) and result.why != self._waits_for:
            self._waits_for = result.why
            self._say(result.why)

    def _act(self, action: Action) -> Wait | None:
        """Carries one action out; a Wait when it has to be tried again later."""
        try:
            match action:
                case Create():
                    return self._create(action)
                case Delete():
                    self._delete(action)
                case Note(provision=provision):
                    self._run.write_provision(provision)
                case Close(provision=provision):
                    self._say(f"{provision.name} is gone: {provision.why}")
                    assert self.observation is not None
                    closing.close(self._run, self._wanted, self._place, self.observation, provision)
                case AskToStop(by=by, resumes=resumes):
                    self._say(f"{by}: the hosts are asked to save and leave")
                    self._run.request_stop(self._now(), by, resumes=resumes)
                case ClearStop():
                    self._run.clear_stop()
                case Say(text=text) if text not in self._told:
                    self._told[text] = None
                    self._say(text)
                case _:
                    pass
        except Refusal as error:
            return Wait(why=f"{error.message}; trying again")
        return None

    def _create(self, action: Create) -> Wait | None:
        provision = self._claimed(action)
        if provision is None:
            # Another supervisor was quicker: look again.
            return None
        try:
            self._place.create(action.option, action.number, is_probe=action.is_probe)
        except Refusal as error:
            if error.fault.trouble in NOT_SURE:
                raise
            ended = closing.refused(provision, error.fault, self._now())
            self._run.write_provision(ended)
            self._say(error.message)
            return None
        self._run.write_provision(closing.created(provision))
        kind = "to see whether there are more" if action.is_probe else f"{action.option.capacity}"
        where = action.option.place.rpartition("/")[2]
        self._say(f"asked for {action.option.num_slices} slices in {where} ({kind}): {provision.name}")
        return None

    def _claimed(self, action: Create) -> Provision | None:
        """The provision under this number, claimed now or before; None when it is another's."""
        assert self.observation is not None
        known = next((each for each in self.observation.provisions if each.number == action.number), None)
        if known is not None:
            return known
        option = action.option
        provision = Provision(
            number=action.number,
            order=self._wanted.order.id,
            place=option.place,
            capacity=option.capacity,
            num_slices=option.num_slices,
            is_probe=action.is_probe,
            name=self._place.name(option, is_probe=action.is_probe),
            num_chips=option.num_chips,
            usd_per_hour=option.usd_per_hour,
            requested_s=self._now(),
        )
        return provision if self._run.claim_provision(provision) else None

    def _delete(self, action: Delete) -> None:
        there = action.machines
        for provision in self._open_provisions():
            if is_of(there, provision) and provision.trouble is None:
                self._run.write_provision(closing.doomed(provision, action))
                self._say(f"removing {there.name} ({there.state}): {action.why}")
        self._place.delete(there)

    def _open_provisions(self) -> Sequence[Provision]:
        assert self.observation is not None
        return [each for each in self.observation.provisions if each.ended_s is None]
