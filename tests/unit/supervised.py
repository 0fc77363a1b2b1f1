"""Short builders of what the supervisor sees, for tables."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.ledger import AttemptEnd, AttemptStart, StopRequest
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
from launcher.supervise.observation import Fault, Machines, Observation, Option, Phase, Wanted
from launcher.supervise.records import Order, Provision, Trouble

T = 1_800_000_000.0
"""The order was launched then; minutes below count from it."""
A, B = "projects/p/locations/us-a", "projects/p/locations/us-b"
ORDER = Order(id="o1", recipe="launches/r.yaml", bundle="sha256:0", launched_s=T, by="me")


def at(minutes: float) -> float:
    return T + 60 * minutes


def option(place: str = A, capacity: str = "spot", num_slices: int = 2) -> Option:
    return Option(
        place=place,
        capacity=capacity,
        num_slices=num_slices,
        num_chips=4 * num_slices,
        usd_per_hour=8.0 * num_slices,
    )


def wanted(**changes: Any) -> Wanted:
    base = Wanted(
        run="run",
        order=ORDER,
        options=(option(),),
        num_slices=2,
        is_elastic=False,
        restarts_itself=False,
        max_restarts=3,
        max_attempts_without_progress=3,
        grace_period_s=30.0,
        fallback_after_s=900.0,
        grow_after_s=900.0,
        deadline_s=None,
        max_cost_usd=None,
    )
    return dataclasses.replace(base, **changes)


FALLBACKS = wanted(options=(option(), option(B), option(A, "on_demand")))
ELASTIC = wanted(options=(option(), option(num_slices=1)), is_elastic=True)
ELASTIC_4 = wanted(
    options=tuple(option(num_slices=number) for number in (4, 3, 2, 1)), is_elastic=True, num_slices=4
)
JOBSET = wanted(restarts_itself=True, options=(option("ctx/default"),))
ELASTIC_JOBSET = wanted(
    restarts_itself=True,
    is_elastic=True,
    options=(option("ctx/default"), option("ctx/default", num_slices=1)),
)


def provision(number: int = 1, *, asked: float = 0, ready: float | None = None, **changes: Any) -> Provision:
    base = Provision(
        number=number,
        order="o1",
        place=A,
        capacity="spot",
        num_slices=2,
        is_probe=False,
        name="run-x",
        num_chips=8,
        usd_per_hour=16.0,
        requested_s=at(asked),
        is_created=True,
        ready_s=None if ready is None else at(ready),
    )
    return dataclasses.replace(base, **changes)


def ended(number: int, trouble: Trouble, *, asked: float, at_: float, **changes: Any) -> Provision:
    why = f"it was {trouble}"
    return dataclasses.replace(
        provision(number, asked=asked, ended_s=at(at_), trouble=trouble, why=why, code="CODE"), **changes
    )


def machines(phase: Phase, state: str = "", *, number: int = 1, **changes: Any) -> Machines:
    base = Machines(
        name="run-x",
        place=A,
        provision=number,
        order="o1",
        num_slices=2,
        capacity="spot",
        is_probe=False,
        phase=phase,
        state=state or phase.value.upper(),
        created_s=at(0),
    )
    return dataclasses.replace(base, **changes)


def probe(phase: Phase, state: str = "", **changes: Any) -> Machines:
    return dataclasses.replace(
        machines(phase, state, number=2), is_probe=True, num_slices=1, name="run-x-probe", **changes
    )


def probe_provision(number: int = 2, **changes: Any) -> Provision:
    return dataclasses.replace(provision(number, **changes), is_probe=True, num_slices=1, name="run-x-probe")


def fault(trouble: Trouble, code: str = "CODE") -> Fault:
    return Fault(trouble=trouble, code=code, message="said so")


def attempt(number: int = 1, *, begun: float = 2, from_step: int = -1) -> AttemptStart:
    return AttemptStart(
        attempt=number, started_s=at(begun), hosts=("s0-h0", "s1-h0"), from_step=from_step, lock={}
    )


def end(
    code: int, *, at_: float, steps: int = 10, host: str | None = "s0-h0", text: str = "why"
) -> AttemptEnd:
    return AttemptEnd(
        end_s=at(at_),
        exit_code=code,
        first_failing_host=host,
        message=text,
        hint="",
        from_step=0,
        to_step=steps,
    )


def stop(minutes: float, by: str = "me", *, resumes: bool = False) -> StopRequest:
    return StopRequest(requested_s=at(minutes), by=by, resumes=resumes)


def seen(*there: Machines, **changes: Any) -> Observation:
    return dataclasses.replace(Observation(machines=there), **changes)


def told(action: Action) -> str:
    """An action in a few words."""
    match action:
        case Create(option=made, number=number, is_probe=is_probe):
            zone = made.place.rpartition("/")[2]
            return f"{'probe' if is_probe else 'create'} {made.num_slices} {made.capacity} {zone} #{number}"
        case Delete(machines=there, trouble=trouble):
            return f"delete {there.name} {trouble.name}"
        case Note(provision=noted):
            if noted.ready_s is not None:
                return f"note #{noted.number} ready"
            return f"note #{noted.number} created"
        case Close(provision=closed):
            assert closed.trouble is not None
            return f"close #{closed.number} {closed.trouble.name}"
        case AskToStop(resumes=resumes):
            return "ask to move" if resumes else "ask to stop"
        case ClearStop():
            return "clear stop"
        case Say():
            return "say"
        case Wait():
            return "wait"
        case Finish(exit_code=code):
            return f"finish {int(code)}"
