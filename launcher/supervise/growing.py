"""How a run on fewer slices gets the missing ones back: a part of ``decide``.

Where only asking tells whether there are chips (TPU VMs), a second request for the missing slices is the
probe: once its machines are there, the hosts save and leave, both are given back, and all slices are asked
for at once. Where the nodes can be counted (GKE), nothing has to be asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.supervise.actions import Action, AskToStop, Create, Delete, Wait
from launcher.supervise.observation import Machines, Observation, Option, Phase, Wanted
from launcher.supervise.records import Provision, Trouble

GROWING = "more slices can be had"


def grow(
    wanted: Wanted,
    seen: Observation,
    main: Provision,
    probe: Provision | None,
    there: Machines | None,
    now: float,
) -> Sequence[Action]:
    """What to do about slices that are missing; nothing when none is, or it is too early.

    Args:
      wanted: the run.
      seen: it goes on with the machines of ``main``.
      main: the provision under way.
      probe: the one that asks for the missing slices, if any.
      there: its machines.
      now: Unix time.
    """
    if probe is not None:
        return _wait_for(wanted, probe, there, now) if there is not None else []
    since_s = max(
        [main.ready_s or main.requested_s, *(each.ended_s or 0.0 for each in _probes_since(seen, main))]
    )
    if main.num_slices >= wanted.num_slices or now - since_s < wanted.grow_after_s:
        return []
    if seen.room is not None:
        larger = [each for each in wanted.options if main.num_slices < each.num_slices <= seen.room]
        return [AskToStop(by=GROWING, resumes=True)] if larger else []
    # One fewer after each that failed: half of what is missing is better than nothing.
    number = max(1, wanted.num_slices - main.num_slices - len(_probes_since(seen, main)))
    option = missing(wanted, main, number)
    return [Create(option=option, number=0, is_probe=True)] if option else []


def missing(wanted: Wanted, main: Provision, number: int) -> Option | None:
    """The request for ``number`` more slices; None when the run cannot go on with so many."""
    total = main.num_slices + number
    here = [each for each in wanted.options if (each.place, each.capacity) == (main.place, main.capacity)]
    whole = next((each for each in here if each.num_slices == total), None)
    if whole is None:
        return None
    price = whole.usd_per_hour
    return Option(
        place=main.place,
        capacity=main.capacity,
        num_slices=number,
        num_chips=whole.num_chips * number // total,
        usd_per_hour=None if price is None else price * number / total,
    )


def _probes_since(seen: Observation, main: Provision) -> Sequence[Provision]:
    return [each for each in seen.provisions if each.is_probe and each.number > main.number]


def _wait_for(wanted: Wanted, probe: Provision, there: Machines, now: float) -> Sequence[Action]:
    match there.phase:
        case Phase.UP:
            return [AskToStop(by=GROWING, resumes=True)]
        case Phase.LOST:
            trouble = there.fault.trouble if there.fault else Trouble.NO_CAPACITY
            return [Delete(machines=there, trouble=trouble, why=f"no chips to grow: {there.state}")]
        case Phase.WAITING if now - probe.requested_s > wanted.fallback_after_s:
            return [Delete(machines=there, trouble=Trouble.NO_CAPACITY, why="no chips to grow")]
    return [Wait(why=f"{there.num_slices} more slices were asked for ({there.state})")]
