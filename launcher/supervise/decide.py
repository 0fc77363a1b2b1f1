"""What to do about a run now: one pure function of what is wanted, what is seen and the time.

    actions = decide(wanted, observation, now)

The order of its questions: is the ledger true, are there machines that should not be, is the run over,
and only then how its machines are. Its table is tests/unit/test_decide.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.budget import Verdict, judge
from launcher.cost import spent
from launcher.supervise import growing, healing
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
from launcher.supervise.choose import choose, key
from launcher.supervise.limits import reached
from launcher.supervise.observation import (
    MEANING,
    Machines,
    Observation,
    Option,
    Phase,
    Wanted,
    is_of,
)
from launcher.supervise.records import TERMINAL, Provision, Trouble
from recipes.contract import ExitCode

LEAVE_S = 60.0
"""How long hosts may take beyond their grace period to say that they have left."""


def decide(wanted: Wanted, seen: Observation, now: float) -> Sequence[Action]:
    """What to do now; never nothing: the last action is a Wait, a Finish, or changes what is seen next.

    Args:
      wanted: what is to be kept running.
      seen: everything about the run at this moment.
      now: Unix time.
    """
    case = _Case(wanted, seen, now)
    if books := case.books():
        return books
    if over := case.over():
        return case.wind_up(over)
    if (limit := case.limit()) and case.main is not None:
        return [AskToStop(by=limit, resumes=False)]
    if limit:
        return case.wind_up(Finish(exit_code=ExitCode.PREEMPTED, reason=limit))
    return case.keep_running()


class _Case:
    """One decision: what is derived from the observation more than once."""

    def __init__(self, wanted: Wanted, seen: Observation, now: float) -> None:
        self.wanted, self.seen, self.now = wanted, seen, now
        self.ours = [each for each in seen.provisions if each.order == wanted.order.id]
        live = [each for each in seen.provisions if each.ended_s is None]
        self.open = live
        self.main = next((each for each in reversed(live) if not each.is_probe), None)
        self.probe = next((each for each in reversed(live) if each.is_probe), None)

    def machines_of(self, provision: Provision | None) -> Machines | None:
        """What is there of a provision."""
        if provision is None:
            return None
        return next((each for each in self.seen.machines if is_of(each, provision)), None)

    # The ledger

    def books(self) -> Sequence[Action]:
        """What brings the ledger and the machines into agreement."""
        for provision in self.open:
            if action := self._book(provision):
                return [action]
        return [action for each in self.seen.machines for action in self._unexpected(each)]

    def _book(self, provision: Provision) -> Action | None:
        there = self.machines_of(provision)
        if there is not None:
            noted = provision if provision.is_created else dataclasses.replace(provision, is_created=True)
            if there.phase is Phase.UP and noted.ready_s is None:
                noted = dataclasses.replace(noted, ready_s=self.now)
            return Note(provision=noted) if noted != provision else None
        if provision.place in self.seen.unseen:
            return None
        if not provision.is_created and (option := self._wanted_still(provision)):
            # Claimed by a supervisor that may have died before it asked.
            return Create(option=option, number=provision.number, is_probe=provision.is_probe)
        trouble = provision.trouble or (Trouble.PREEMPTED if provision.ready_s else Trouble.UNAVAILABLE)
        why = provision.why or f"the machines are gone: {MEANING[trouble]}"
        return Close(provision=dataclasses.replace(provision, ended_s=self.now, trouble=trouble, why=why))

    def _wanted_still(self, provision: Provision) -> Option | None:
        """The option that a claimed provision would be created from."""
        if provision.trouble or provision.order != self.wanted.order.id or self._is_ending():
            return None
        if provision.is_probe:
            main = self.main
            return growing.missing(self.wanted, main, provision.num_slices) if main else None
        return next((each for each in self.wanted.options if key(each) == key(provision)), None)

    def _is_ending(self) -> bool:
        return bool(self.seen.stop) or self.verdict() is not None

    def _unexpected(self, there: Machines) -> Sequence[Action]:
        """What to do about machines that no open provision accounts for."""
        if there.phase in (Phase.DELETING, Phase.OVER) or any(is_of(there, each) for each in self.open):
            return []
        known = any(each.number == there.provision for each in self.seen.provisions)
        of_this_order = there.order in ("", self.wanted.order.id)
        if known or not of_this_order or there.is_probe or self.main is not None:
            why = "left over from an earlier launch" if not of_this_order else "left over"
            return [Delete(machines=there, trouble=Trouble.REPLACED, why=why)]
        return [Note(provision=self._adopted(there))]

    def _adopted(self, there: Machines) -> Provision:
        """The ledger's entry of machines that were made by a launch, or whose entry was lost."""
        option = next(
            (
                each
                for each in self.wanted.options
                if key(each) == (there.place, there.capacity, there.num_slices)
            ),
            None,
        )
        return Provision(
            number=there.provision or self.next_number(),
            order=self.wanted.order.id,
            place=there.place,
            capacity=there.capacity,
            num_slices=there.num_slices,
            is_probe=False,
            name=there.name,
            num_chips=option.num_chips if option else 0,
            usd_per_hour=option.usd_per_hour if option else None,
            requested_s=there.created_s,
            is_created=True,
            ready_s=self.now if there.phase is Phase.UP else None,
        )

    def next_number(self) -> int:
        return max((each.number for each in self.seen.provisions), default=0) + 1

    # The end

    def verdict(self) -> Verdict | None:
        """How the run has ended, as far as its attempts or its JobSet tell."""
        wanted = self.wanted
        if not wanted.restarts_itself:
            return judge(
                self.seen.ends,
                max_restarts=wanted.max_restarts,
                max_attempts_without_progress=wanted.max_attempts_without_progress,
            )
        there = next((each for each in self.seen.machines if each.phase is Phase.OVER), None)
        # One that was over before this launch is being replaced by it.
        if there is None or (self.main is None and there.created_s < wanted.order.launched_s):
            return None
        last = self.seen.ends[-1] if self.seen.ends else None
        if last is None:
            return Verdict(exit_code=ExitCode.INFRASTRUCTURE, reason=there.state, hint="", host="")
        code = ExitCode(last.exit_code) if last.exit_code in tuple(ExitCode) else ExitCode.INFRASTRUCTURE
        reason = "complete" if code is ExitCode.COMPLETE else last.message or there.state
        return Verdict(exit_code=code, reason=reason, hint=last.hint, host=last.first_failing_host or "")

    def over(self) -> Finish | None:
        """Why the run needs no machines any more, or None."""
        verdict, stop = self.verdict(), self.seen.stop
        # What a JobSet ended with after it was asked to stop says less than why it was.
        was_asked = stop is not None and not stop.resumes
        if verdict is not None and not (was_asked and verdict.exit_code is ExitCode.PREEMPTED):
            return Finish(
                exit_code=verdict.exit_code, reason=verdict.reason, hint=verdict.hint, host=verdict.host
            )
        if stop is not None and not stop.resumes:
            return Finish(exit_code=ExitCode.PREEMPTED, reason=f"stopped: {stop.by}")
        return self._hopeless()

    def _hopeless(self) -> Finish | None:
        """After what asking again would not mend."""
        past = [each for each in self.ours if not each.is_probe and each.ended_s is not None]
        last = past[-1] if past else None
        if last is None or self.main is not None:
            return None
        if last.trouble in TERMINAL:
            return Finish(exit_code=ExitCode.BAD_INPUT, reason=last.why, hint="mend it, then launch again")
        if last.trouble is Trouble.RESERVATION and len(self.wanted.options) == 1:
            hint = "mend target.reservation, or give target.fallbacks"
            return Finish(exit_code=ExitCode.BAD_INPUT, reason=last.why, hint=hint)
        limit = self.wanted.max_attempts_without_progress
        if healing.failed_in_a_row(past, self.seen.ends) < limit:
            return None
        return Finish(
            exit_code=ExitCode.EXPERIMENT_FAILED,
            reason=f"{limit} sets of machines in a row did not get the run going; the last: {last.why}",
            hint="read its log, mend the cause, then launch again",
        )

    def limit(self) -> str | None:
        wanted = self.wanted
        return reached(
            now=self.now,
            spent_usd=spent(self.seen.provisions, self.now),
            deadline_s=wanted.deadline_s,
            max_cost_usd=wanted.max_cost_usd,
        )

    def wind_up(self, finish: Finish) -> Sequence[Action]:
        """Lets the hosts save where they can, then removes everything, then ends."""
        stop = self.seen.stop
        if stop is not None and self._hosts_are_leaving(stop.requested_s):
            return [Wait(why=f"{finish.reason}; the hosts are saving")]
        if actions := self._remove_all(Trouble.REPLACED, finish.reason):
            return actions
        left = next((each for each in self.seen.machines if each.phase is not Phase.OVER), None)
        return [Wait(why=f"{left.name} is being removed ({left.state})") if left else finish]

    def _hosts_are_leaving(self, asked_s: float) -> bool:
        there = self.machines_of(self.main)
        is_running = there is not None and there.phase in (Phase.UP, Phase.DEGRADED)
        is_at_work = self.seen.is_held or self.seen.attempt is not None
        until_s = asked_s + self.wanted.grace_period_s + LEAVE_S
        return is_running and is_at_work and self.now < until_s

    def _remove_all(self, trouble: Trouble, why: str) -> Sequence[Action]:
        """Empty when nothing is left anywhere."""
        actions: list[Action] = []
        for provision in reversed(self.open):
            there = self.machines_of(provision)
            if there is None:
                actions.append(Wait(why=f"{provision.place} does not answer"))
            elif there.phase is Phase.OVER:
                # Left for people to look at; its own time to live removes it.
                ended = dataclasses.replace(provision, ended_s=self.now, trouble=trouble, why=why)
                actions.append(Close(provision=ended))
            else:
                actions.append(_removal(there, trouble, why))
        return actions

    # While it goes on

    def keep_running(self) -> Sequence[Action]:
        there = self.machines_of(self.main)
        if self.main is None:
            return self._get_machines()
        if there is None:
            return [Wait(why=f"{self.main.place} does not answer")]
        if (loss := healing.loss(self.wanted, self.seen, self.main, there, self.now)) is not None:
            return [loss, *self._drop_probe()]
        warnings = [Say(text=text) for text in healing.warnings(self.wanted, self.seen)]
        stop = self.seen.stop
        if stop is not None:
            return [*warnings, *self._change_over(stop.requested_s)]
        if there.phase is Phase.UP and self.wanted.is_elastic:
            grow = growing.grow(
                self.wanted, self.seen, self.main, self.probe, self.machines_of(self.probe), self.now
            )
            if grow:
                return [*warnings, *(self._numbered(each) for each in grow)]
        return [*warnings, healing.patience(self.wanted, self.seen, self.main, there)]

    def _numbered(self, action: Action) -> Action:
        if isinstance(action, Create) and action.number == 0:
            return dataclasses.replace(action, number=self.next_number())
        return action

    def _drop_probe(self) -> Sequence[Action]:
        there = self.machines_of(self.probe)
        return [_removal(there, Trouble.REPLACED, "the machines that it was for are gone")] if there else []

    def _change_over(self, asked_s: float) -> Sequence[Action]:
        """Once the hosts have left, their machines are given back for others."""
        if self._hosts_are_leaving(asked_s):
            return [Wait(why="the hosts are saving, to go on with other machines")]
        return self._remove_all(Trouble.REPLACED, "given back to go on with more slices")

    def _get_machines(self) -> Sequence[Action]:
        seen = self.seen
        if seen.unseen:
            return [Wait(why=f"{', '.join(seen.unseen)} does not answer, and may have machines of this run")]
        if there := next((each for each in seen.machines if each.phase is not Phase.OVER), None):
            return [Wait(why=f"{there.name} is being removed ({there.state})")]
        if self.probe is not None:
            return self._remove_all(Trouble.REPLACED, "the machines that it was for are gone")
        if seen.stop is not None:
            return [ClearStop()]
        found = choose(self.wanted, self.ours, seen.room, self.now)
        if isinstance(found, Wait):
            return [found]
        return [Create(option=found, number=self.next_number())]


def _removal(there: Machines, trouble: Trouble, why: str) -> Action:
    if there.phase is Phase.DELETING:
        return Wait(why=f"{there.name} is being removed")
    if there.phase is Phase.LEAVING:
        return Wait(why=f"{there.name} is being taken away ({there.state})")
    return Delete(machines=there, trouble=trouble, why=why)
