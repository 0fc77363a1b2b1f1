"""Scenes that rows of the table of ``decide`` share (see test_decide.py)."""

from __future__ import annotations

import dataclasses

from launcher.supervise.observation import Observation, Phase, Wanted
from launcher.supervise.records import Trouble
from tests.unit import supervised as it
from tests.unit.supervised import machines, provision, seen

W, F, E, J = it.wanted(), it.FALLBACKS, it.ELASTIC, it.JOBSET
CTX = "ctx/default"
P = Phase
UP = machines(P.UP, "ACTIVE")
ON_1 = provision(ready=2, num_slices=1)
UP_ON_1 = dataclasses.replace(UP, num_slices=1)
JOB = dataclasses.replace(machines(P.UP, "Running"), place=CTX, provision=0, order="")
JOB_LEDGER = provision(place=CTX, ready=0)
DONE, FAILED, BAD, GONE, LOST = (it.end(code, at_=5) for code in (0, 1, 2, 42, 75))
STUCK = [it.end(75, at_=minutes, steps=0) for minutes in (3, 4, 5)]
Row = tuple[str, Wanted, Observation, float, list[str]]


def gone(trouble: Trouble, *, number: int = 1, at_: float = 10, **changes: object) -> Observation:
    """Nothing is there any more, after ``trouble``."""
    return seen(provisions=[it.ended(number, trouble, asked=0, at_=at_, **changes)])
