"""``decide``: what is done about a run, row by row. Minutes count from the launch (see supervised.py)."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.supervise.decide import decide
from launcher.supervise.observation import Observation, Phase, Wanted
from launcher.supervise.records import Trouble
from tests.unit import supervised as it
from tests.unit.supervised import A, B, at, machines, provision, seen

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


BEGINNING: list[Row] = [
    ("nothing yet: ask", W, seen(), 0, ["create 2 spot us-a #1"]),
    ("nothing yet, elastic: ask for all", E, seen(), 0, ["create 2 spot us-a #1"]),
    ("a zone does not answer: nothing new", W, seen(unseen=[A]), 0, ["wait"]),
    ("another zone does not answer: nothing new", F, seen(unseen=[B]), 0, ["wait"]),
    (
        "claimed, not asked: ask under that number",
        W,
        seen(provisions=[provision(is_created=False)]),
        1,
        ["create 2 spot us-a #1"],
    ),
    (
        "claimed, the zone does not answer",
        W,
        seen(provisions=[provision(is_created=False)], unseen=[A]),
        1,
        ["wait"],
    ),
    (
        "claimed by an older order: given up",
        W,
        seen(provisions=[provision(is_created=False, order="o0")]),
        1,
        ["close #1 UNAVAILABLE"],
    ),
    (
        "claimed for what is no option any more: given up",
        W,
        seen(provisions=[provision(is_created=False, place=B)]),
        1,
        ["close #1 UNAVAILABLE"],
    ),
    (
        "claimed, and there after all: noted",
        W,
        seen(machines(P.WAITING), provisions=[provision(is_created=False)]),
        1,
        ["note #1 created"],
    ),
    ("there without an entry: adopted", W, seen(machines(P.WAITING)), 1, ["note #1 created"]),
    ("there and up without an entry: adopted", W, seen(UP), 1, ["note #1 ready"]),
    ("of an older order: removed", W, seen(machines(P.UP, order="o0")), 1, ["delete run-x REPLACED"]),
    ("of an older order, being removed: wait", W, seen(machines(P.DELETING, order="o0")), 1, ["wait"]),
    (
        "a second set elsewhere: removed",
        W,
        seen(UP, machines(P.WAITING, place=B, number=7), provisions=[provision(ready=2)]),
        3,
        ["delete run-x REPLACED"],
    ),
    (
        "a closed entry's machines came late: removed",
        W,
        seen(machines(P.WAITING), provisions=[it.ended(1, Trouble.UNAVAILABLE, asked=0, at_=1)]),
        3,
        ["delete run-x REPLACED"],
    ),
    ("a probe without an entry: removed", E, seen(it.probe(P.UP)), 3, ["delete run-x-probe REPLACED"]),
    (
        "a successor finds a number taken",
        W,
        seen(provisions=[it.ended(4, Trouble.PREEMPTED, asked=0, at_=1)]),
        3,
        ["create 2 spot us-a #5"],
    ),
]
QUEUED: list[Row] = [
    *[
        (f"{state}: wait", W, seen(machines(P.WAITING, state), provisions=[provision()]), 5, ["wait"])
        for state in ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")
    ],
    (
        "PROVISIONING: wait",
        W,
        seen(machines(P.STARTING, "PROVISIONING"), provisions=[provision()]),
        5,
        ["wait"],
    ),
    ("no alternative: wait for ever", W, seen(machines(P.WAITING), provisions=[provision()]), 9999, ["wait"]),
    ("an alternative, too early", F, seen(machines(P.WAITING), provisions=[provision()]), 14, ["wait"]),
    (
        "an alternative: give up",
        F,
        seen(machines(P.WAITING), provisions=[provision()]),
        16,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "elastic: fewer slices are an alternative",
        E,
        seen(machines(P.WAITING), provisions=[provision()]),
        16,
        ["delete run-x NO_CAPACITY"],
    ),
    ("being made: more patience", F, seen(machines(P.STARTING), provisions=[provision()]), 16, ["wait"]),
    (
        "being made for too long: give up",
        F,
        seen(machines(P.STARTING), provisions=[provision()]),
        46,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "given up, being removed: wait",
        F,
        seen(machines(P.DELETING), provisions=[provision(trouble=Trouble.NO_CAPACITY)]),
        17,
        ["wait"],
    ),
    (
        "given up, gone: closed",
        F,
        seen(provisions=[provision(trouble=Trouble.NO_CAPACITY)]),
        17,
        ["close #1 NO_CAPACITY"],
    ),
    (
        "given up, the zone is away: wait",
        F,
        seen(provisions=[provision(trouble=Trouble.NO_CAPACITY)], unseen=[A]),
        17,
        ["wait"],
    ),
    (
        "FAILED: removed with the service's reason",
        W,
        seen(machines(P.LOST, "FAILED", fault=it.fault(Trouble.QUOTA)), provisions=[provision()]),
        5,
        ["delete run-x QUOTA"],
    ),
    (
        "FAILED without a reason: no capacity",
        W,
        seen(machines(P.LOST, "FAILED"), provisions=[provision()]),
        5,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "an unknown state: nothing",
        W,
        seen(machines(P.UNKNOWN, "STATE_99"), provisions=[provision()]),
        500,
        ["wait"],
    ),
    (
        "an unknown state of machines that were up: nothing",
        W,
        seen(machines(P.UNKNOWN, "STATE_99"), provisions=[provision(ready=2)]),
        500,
        ["wait"],
    ),
    (
        "never there and gone: asked again under a new number",
        W,
        seen(provisions=[provision()]),
        5,
        ["close #1 UNAVAILABLE"],
    ),
]
NEXT: list[Row] = [
    ("preempted: at once again", W, gone(Trouble.PREEMPTED), 10, ["create 2 spot us-a #2"]),
    ("preempted: the first option again", F, gone(Trouble.PREEMPTED, place=B), 10, ["create 2 spot us-a #2"]),
    ("no capacity: the next option at once", F, gone(Trouble.NO_CAPACITY), 10, ["create 2 spot us-b #2"]),
    ("quota: the next option at once", F, gone(Trouble.QUOTA), 10, ["create 2 spot us-b #2"]),
    ("reservation: the next option at once", F, gone(Trouble.RESERVATION), 10, ["create 2 spot us-b #2"]),
    (
        "both spot zones empty: on demand",
        F,
        seen(
            provisions=[
                it.ended(1, Trouble.NO_CAPACITY, asked=0, at_=10),
                it.ended(2, Trouble.NO_CAPACITY, asked=10, at_=20, place=B),
            ]
        ),
        20,
        ["create 2 on_demand us-a #3"],
    ),
    (
        "all empty: the oldest, later",
        F,
        seen(
            provisions=[
                it.ended(1, Trouble.NO_CAPACITY, asked=0, at_=1),
                it.ended(2, Trouble.NO_CAPACITY, asked=1, at_=2, place=B),
                it.ended(3, Trouble.NO_CAPACITY, asked=2, at_=3, capacity="on_demand"),
            ]
        ),
        4,
        ["create 2 spot us-a #4"],
    ),
    ("empty long ago is forgotten", F, gone(Trouble.NO_CAPACITY), 26, ["create 2 spot us-a #2"]),
    ("elastic: fewer slices", E, gone(Trouble.NO_CAPACITY), 10, ["create 1 spot us-a #2"]),
    (
        "elastic: one fewer at a time",
        it.ELASTIC_4,
        seen(
            provisions=[
                it.ended(1, Trouble.NO_CAPACITY, asked=0, at_=9, num_slices=4),
                it.ended(2, Trouble.NO_CAPACITY, asked=9, at_=10, num_slices=3),
            ]
        ),
        10,
        ["create 2 spot us-a #3"],
    ),
    (
        "elastic, preempted: all slices first",
        E,
        gone(Trouble.PREEMPTED, num_slices=1),
        10,
        ["create 2 spot us-a #2"],
    ),
    (
        "elastic, preempted, all were tried just now: fewer",
        E,
        seen(
            provisions=[
                it.ended(1, Trouble.NO_CAPACITY, asked=0, at_=5),
                it.ended(2, Trouble.PREEMPTED, asked=5, at_=10, num_slices=1),
            ]
        ),
        10,
        ["create 1 spot us-a #3"],
    ),
    ("the only option is empty: not at once", W, gone(Trouble.NO_CAPACITY), 10, ["wait"]),
    ("the only option was empty: again", W, gone(Trouble.NO_CAPACITY), 10.25, ["create 2 spot us-a #2"]),
    ("no quota: not at once", W, gone(Trouble.QUOTA), 10.05, ["wait"]),
    ("no quota: again", W, gone(Trouble.QUOTA), 10.3, ["create 2 spot us-a #2"]),
    ("the API failed: not at once", W, gone(Trouble.UNAVAILABLE), 10.05, ["wait"]),
    (
        "the API failed three times: longer",
        W,
        seen(provisions=[it.ended(n, Trouble.UNAVAILABLE, asked=n, at_=n) for n in (1, 2, 3)]),
        3.4,
        ["wait"],
    ),
    (
        "the API failed three times: after a minute",
        W,
        seen(provisions=[it.ended(n, Trouble.UNAVAILABLE, asked=n, at_=n) for n in (1, 2, 3)]),
        4.1,
        ["create 2 spot us-a #4"],
    ),
    (
        "after hours of failures: ten minutes at most",
        W,
        seen(provisions=[it.ended(n, Trouble.UNAVAILABLE, asked=n, at_=n) for n in range(1, 20)]),
        29.1,
        ["create 2 spot us-a #20"],
    ),
    (
        "failures of another order do not count",
        W,
        gone(Trouble.UNAVAILABLE, order="o0"),
        10,
        ["create 2 spot us-a #2"],
    ),
    ("permission: the end", W, gone(Trouble.PERMISSION), 10, ["finish 2"]),
    ("a bad request: the end", F, gone(Trouble.BAD_REQUEST), 10, ["finish 2"]),
    ("the only reservation: the end", W, gone(Trouble.RESERVATION), 10, ["finish 2"]),
    ("the run did not get going: again, not at once", W, gone(Trouble.FAILED), 10, ["wait"]),
    (
        "the run did not get going three times: the end",
        W,
        seen(provisions=[it.ended(n, Trouble.FAILED, asked=n, at_=n + 0.5) for n in (1, 2, 3)]),
        20,
        ["finish 1"],
    ),
    (
        "it got on in between: again",
        W,
        seen(
            provisions=[it.ended(n, Trouble.FAILED, asked=n, at_=n + 0.5) for n in (1, 2, 3)],
            ends=[it.end(75, at_=2.4)],
        ),
        20,
        ["create 2 spot us-a #4"],
    ),
    (
        "preempted in between: again",
        W,
        seen(
            provisions=[
                it.ended(1, Trouble.FAILED, asked=1, at_=2),
                it.ended(2, Trouble.FAILED, asked=2, at_=3),
                it.ended(3, Trouble.PREEMPTED, asked=3, at_=4),
            ]
        ),
        20,
        ["create 2 spot us-a #4"],
    ),
]
RUNNING: list[Row] = [
    ("up: noted once", W, seen(UP, provisions=[provision()]), 2, ["note #1 ready"]),
    ("up, the hosts are starting", W, seen(UP, provisions=[provision(ready=2)]), 10, ["wait"]),
    (
        "up, an attempt is under way",
        W,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True),
        10,
        ["wait"],
    ),
    (
        "up, silent, but process 0 holds the lease",
        W,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True, beat_s=at(3)),
        300,
        ["wait"],
    ),
    ("up, silent for 29 minutes", W, seen(UP, provisions=[provision(ready=2)]), 31, ["wait"]),
    (
        "up, silent for 31 minutes: replaced",
        W,
        seen(UP, provisions=[provision(ready=2)]),
        33,
        ["delete run-x FAILED"],
    ),
    (
        "up, silent since a beat",
        W,
        seen(UP, provisions=[provision(ready=2)], beat_s=at(60)),
        91,
        ["delete run-x FAILED"],
    ),
    (
        "up, silent since an attempt ended",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[it.end(75, at_=60)]),
        80,
        ["wait"],
    ),
    (
        "a host gave up before any attempt: replaced",
        W,
        seen(dataclasses.replace(UP, words="failed: no such bundle"), provisions=[provision(ready=2)]),
        3,
        ["delete run-x FAILED"],
    ),
    (
        "a host gave up while the others train: not yet",
        W,
        seen(
            dataclasses.replace(UP, words="failed: x"),
            provisions=[provision(ready=2)],
            is_held=True,
            attempt=it.attempt(),
        ),
        3,
        ["wait"],
    ),
    (
        "a host says what it does",
        W,
        seen(dataclasses.replace(UP, words="installing"), provisions=[provision(ready=2)]),
        3,
        ["wait"],
    ),
    (
        "an attempt failed: the hosts meet again",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST]),
        6,
        ["wait"],
    ),
    (
        "one machine failed twice: its slice is replaced",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST, LOST], failing_machines=["n1", "n1"]),
        6,
        ["delete run-x FAILED"],
    ),
    (
        "two machines failed once each: no bad host",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST, LOST], failing_machines=["n1", "n2"]),
        6,
        ["wait"],
    ),
    (
        "a host of no known machine failed twice: no bad host",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST, LOST], failing_machines=["", ""]),
        6,
        ["wait"],
    ),
    (
        "REPAIRING: patience",
        W,
        seen(machines(P.DEGRADED, "ACTIVE; run-x-1 REPAIRING"), provisions=[provision(ready=2)]),
        10,
        ["wait"],
    ),
    (
        "REPAIRING for too long: replaced",
        W,
        seen(machines(P.DEGRADED, "ACTIVE; run-x-1 REPAIRING"), provisions=[provision(ready=2)]),
        18,
        ["delete run-x FAILED"],
    ),
    (
        "restarting, and trained just now: patience",
        W,
        seen(
            machines(P.STARTING, "ACTIVE; run-x-1 RESTARTING"), provisions=[provision(ready=2)], beat_s=at(99)
        ),
        100,
        ["wait"],
    ),
    (
        "the zone is away: nothing",
        W,
        seen(provisions=[provision(ready=2)], unseen=[A], attempt=it.attempt(), is_held=True),
        10,
        ["wait"],
    ),
]
PREEMPTION: list[Row] = [
    (
        "SUSPENDING: it may not be deleted yet",
        W,
        seen(machines(P.LEAVING, "SUSPENDING"), provisions=[provision(ready=2)]),
        10,
        ["wait"],
    ),
    (
        "SUSPENDED: removed, for it holds quota",
        W,
        seen(
            machines(P.LOST, "SUSPENDED", fault=it.fault(Trouble.PREEMPTED)), provisions=[provision(ready=2)]
        ),
        10,
        ["delete run-x PREEMPTED"],
    ),
    (
        "ACTIVE with a PREEMPTED node: removed",
        W,
        seen(machines(P.LOST, "ACTIVE; run-x-1 PREEMPTED"), provisions=[provision(ready=2)]),
        10,
        ["delete run-x PREEMPTED"],
    ),
    (
        "SUSPENDED before it was up: no capacity after all",
        W,
        seen(machines(P.LOST, "SUSPENDED"), provisions=[provision()]),
        10,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "removal asked, still there: asked again",
        W,
        seen(machines(P.LOST, "SUSPENDED"), provisions=[provision(ready=2, trouble=Trouble.PREEMPTED)]),
        10,
        ["delete run-x PREEMPTED"],
    ),
    (
        "DELETING: its absence is waited for",
        W,
        seen(machines(P.DELETING), provisions=[provision(ready=2, trouble=Trouble.PREEMPTED)]),
        10,
        ["wait"],
    ),
    (
        "gone: closed as preempted",
        W,
        seen(provisions=[provision(ready=2, trouble=Trouble.PREEMPTED)]),
        10,
        ["close #1 PREEMPTED"],
    ),
    (
        "gone without a word: closed as preempted",
        W,
        seen(provisions=[provision(ready=2)]),
        10,
        ["close #1 PREEMPTED"],
    ),
    (
        "lost together with the probe: both removed",
        E,
        seen(
            machines(P.LOST, "SUSPENDED", num_slices=1),
            it.probe(P.WAITING),
            provisions=[ON_1, it.probe_provision()],
        ),
        10,
        ["delete run-x PREEMPTED", "delete run-x-probe REPLACED"],
    ),
    (
        "only the probe is left: removed",
        E,
        seen(
            it.probe(P.WAITING),
            provisions=[
                dataclasses.replace(ON_1, ended_s=at(9), trouble=Trouble.PREEMPTED),
                it.probe_provision(),
            ],
        ),
        10,
        ["wait"],
    ),
]
ENDS: list[Row] = [
    (
        "complete: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[DONE]),
        6,
        ["delete run-x REPLACED"],
    ),
    (
        "complete, being removed",
        W,
        seen(machines(P.DELETING), provisions=[provision(ready=2)], ends=[DONE]),
        6,
        ["wait"],
    ),
    (
        "complete, gone: closed",
        W,
        seen(provisions=[provision(ready=2, trouble=Trouble.REPLACED)], ends=[DONE]),
        6,
        ["close #1 REPLACED"],
    ),
    (
        "complete and closed: the end",
        W,
        seen(provisions=[it.ended(1, Trouble.REPLACED, asked=0, at_=6)], ends=[DONE]),
        6,
        ["finish 0"],
    ),
    (
        "complete though taken away meanwhile: the end",
        W,
        seen(provisions=[it.ended(1, Trouble.PREEMPTED, asked=0, at_=6)], ends=[DONE]),
        6,
        ["finish 0"],
    ),
    (
        "complete while SUSPENDING: wait",
        W,
        seen(machines(P.LEAVING), provisions=[provision(ready=2)], ends=[DONE]),
        6,
        ["wait"],
    ),
    (
        "complete, the zone is away: not the end yet",
        W,
        seen(provisions=[provision(ready=2)], ends=[DONE], unseen=[A]),
        6,
        ["wait"],
    ),
    (
        "the experiment failed: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[FAILED]),
        6,
        ["delete run-x REPLACED"],
    ),
    (
        "the experiment failed: the end",
        W,
        seen(provisions=[it.ended(1, Trouble.REPLACED, asked=0, at_=6)], ends=[FAILED]),
        6,
        ["finish 1"],
    ),
    (
        "bad input: the end",
        W,
        seen(provisions=[it.ended(1, Trouble.REPLACED, asked=0, at_=6)], ends=[BAD]),
        6,
        ["finish 2"],
    ),
    (
        "preempted attempts are no end",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[GONE] * 9),
        6,
        ["wait"],
    ),
    (
        "failures within max_restarts are no end",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST] * 3),
        6,
        ["wait"],
    ),
    (
        "more failures than max_restarts: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[LOST] * 4),
        6,
        ["delete run-x REPLACED"],
    ),
    (
        "no progress three times: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=STUCK),
        6,
        ["delete run-x REPLACED"],
    ),
    (
        "a claim is not asked for when the run is over",
        W,
        seen(provisions=[provision(is_created=False)], ends=[DONE]),
        6,
        ["close #1 UNAVAILABLE"],
    ),
]
STOPS: list[Row] = [
    (
        "stop while an attempt runs: it saves first",
        W,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True, stop=it.stop(10)),
        10.5,
        ["wait"],
    ),
    (
        "stop, the hosts have left: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], ends=[GONE], stop=it.stop(10)),
        10.5,
        ["delete run-x REPLACED"],
    ),
    (
        "stop, the hosts do not leave: removed",
        W,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True, stop=it.stop(10)),
        12,
        ["delete run-x REPLACED"],
    ),
    (
        "stop while queued: removed at once",
        W,
        seen(machines(P.WAITING), provisions=[provision()], stop=it.stop(10)),
        10,
        ["delete run-x REPLACED"],
    ),
    (
        "stop while SUSPENDING: wait",
        W,
        seen(machines(P.LEAVING), provisions=[provision(ready=2)], stop=it.stop(10)),
        10,
        ["wait"],
    ),
    (
        "stop, an unknown state: removed all the same",
        W,
        seen(machines(P.UNKNOWN), provisions=[provision()], stop=it.stop(10)),
        10,
        ["delete run-x REPLACED"],
    ),
    (
        "stop with a probe: both removed",
        E,
        seen(UP_ON_1, it.probe(P.WAITING), provisions=[ON_1, it.probe_provision()], stop=it.stop(10)),
        12,
        ["delete run-x-probe REPLACED", "delete run-x REPLACED"],
    ),
    ("stop, nothing is there: the end", W, seen(stop=it.stop(10)), 10, ["finish 42"]),
    (
        "stop, gone: the end",
        W,
        dataclasses.replace(gone(Trouble.REPLACED), stop=it.stop(5)),
        10,
        ["finish 42"],
    ),
    (
        "stop wins over permission",
        W,
        dataclasses.replace(gone(Trouble.PERMISSION), stop=it.stop(5)),
        10,
        ["finish 42"],
    ),
    (
        "stop, and complete meanwhile: complete",
        W,
        dataclasses.replace(gone(Trouble.REPLACED), stop=it.stop(5), ends=[DONE]),
        10,
        ["finish 0"],
    ),
]
DEADLINE = it.wanted(deadline_s=at(60))
CHEAP = it.wanted(max_cost_usd=8.0)
LIMITS: list[Row] = [
    (
        "the deadline is not there yet",
        DEADLINE,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True),
        59,
        ["wait"],
    ),
    (
        "the deadline: ask to stop",
        DEADLINE,
        seen(UP, provisions=[provision(ready=2)], attempt=it.attempt(), is_held=True),
        60,
        ["ask to stop"],
    ),
    (
        "the deadline while queued: ask to stop",
        DEADLINE,
        seen(machines(P.WAITING), provisions=[provision()]),
        60,
        ["ask to stop"],
    ),
    ("the deadline with nothing there: the end", DEADLINE, seen(), 60, ["finish 42"]),
    (
        "the deadline while moving: stop wins",
        DEADLINE,
        seen(UP, provisions=[provision(ready=2)], stop=it.stop(59.9, resumes=True)),
        60,
        ["ask to stop"],
    ),
    ("half an hour at 16 dollars: not yet", CHEAP, seen(UP, provisions=[provision(ready=2)]), 31, ["wait"]),
    (
        "more is spent: ask to stop",
        CHEAP,
        seen(UP, provisions=[provision(ready=2)], beat_s=at(32)),
        32.1,
        ["ask to stop"],
    ),
    (
        "earlier machines count too",
        CHEAP,
        seen(
            UP,
            provisions=[
                it.ended(1, Trouble.PREEMPTED, asked=0, at_=20, ready_s=at(0)),
                provision(2, asked=20, ready=22),
            ],
            beat_s=at(33),
        ),
        33,
        ["note #2 ready"],
    ),
]
LIMITS[-1] = (
    "earlier machines count too",
    CHEAP,
    seen(
        dataclasses.replace(UP, provision=2),
        provisions=[
            it.ended(1, Trouble.PREEMPTED, asked=0, at_=20, ready_s=at(0)),
            provision(2, asked=20, ready=22),
        ],
    ),
    33,
    ["ask to stop"],
)
GROWING: list[Row] = [
    ("on fewer slices, too early", E, seen(UP_ON_1, provisions=[ON_1], beat_s=at(16)), 16, ["wait"]),
    (
        "on fewer slices: a probe for the missing one",
        E,
        seen(UP_ON_1, provisions=[ON_1], beat_s=at(17)),
        18,
        ["probe 1 spot us-a #2"],
    ),
    (
        "not while the machines are degraded",
        E,
        seen(dataclasses.replace(UP_ON_1, phase=P.DEGRADED), provisions=[ON_1], beat_s=at(17)),
        18,
        ["wait"],
    ),
    ("all slices: no probe", E, seen(UP, provisions=[provision(ready=2)], beat_s=at(99)), 100, ["wait"]),
    (
        "a probe that waits",
        E,
        seen(UP_ON_1, it.probe(P.WAITING), provisions=[ON_1, it.probe_provision(asked=18)], beat_s=at(20)),
        20,
        ["wait"],
    ),
    (
        "a probe that waited long enough",
        E,
        seen(UP_ON_1, it.probe(P.WAITING), provisions=[ON_1, it.probe_provision(asked=18)], beat_s=at(34)),
        34,
        ["delete run-x-probe NO_CAPACITY"],
    ),
    (
        "a probe that failed",
        E,
        seen(
            UP_ON_1,
            it.probe(P.LOST, "FAILED"),
            provisions=[ON_1, it.probe_provision(asked=18)],
            beat_s=at(20),
        ),
        20,
        ["delete run-x-probe NO_CAPACITY"],
    ),
    (
        "a probe that is up: noted",
        E,
        seen(UP_ON_1, it.probe(P.UP), provisions=[ON_1, it.probe_provision(asked=18)], beat_s=at(20)),
        20,
        ["note #2 ready"],
    ),
    (
        "a probe that is up: the hosts are asked to move",
        E,
        seen(
            UP_ON_1, it.probe(P.UP), provisions=[ON_1, it.probe_provision(asked=18, ready=20)], beat_s=at(20)
        ),
        20,
        ["ask to move"],
    ),
    (
        "asked to move: they save",
        E,
        seen(
            UP_ON_1,
            it.probe(P.UP),
            provisions=[ON_1, it.probe_provision(asked=18, ready=20)],
            is_held=True,
            attempt=it.attempt(),
            stop=it.stop(20, resumes=True),
        ),
        20.5,
        ["wait"],
    ),
    (
        "they have left: both given back",
        E,
        seen(
            UP_ON_1,
            it.probe(P.UP),
            provisions=[ON_1, it.probe_provision(asked=18, ready=20)],
            ends=[GONE],
            stop=it.stop(20, resumes=True),
        ),
        20.5,
        ["delete run-x-probe REPLACED", "delete run-x REPLACED"],
    ),
    (
        "both gone: the next may begin",
        E,
        seen(
            provisions=[
                it.ended(1, Trouble.REPLACED, asked=0, at_=21, num_slices=1, ready_s=at(2)),
                dataclasses.replace(
                    it.probe_provision(asked=18, ready=20), ended_s=at(21), trouble=Trouble.REPLACED
                ),
            ],
            stop=it.stop(20, resumes=True),
        ),
        21,
        ["clear stop"],
    ),
    (
        "then all slices, though they were scarce just now",
        E,
        seen(
            provisions=[
                it.ended(1, Trouble.NO_CAPACITY, asked=0, at_=15),
                it.ended(2, Trouble.REPLACED, asked=15, at_=21, num_slices=1, ready_s=at(16)),
                dataclasses.replace(
                    it.probe_provision(3, asked=18, ready=20), ended_s=at(21), trouble=Trouble.REPLACED
                ),
            ]
        ),
        21,
        ["create 2 spot us-a #4"],
    ),
    (
        "after a probe in vain: not again at once",
        E,
        seen(
            UP_ON_1,
            provisions=[
                ON_1,
                dataclasses.replace(
                    it.probe_provision(asked=18), ended_s=at(35), trouble=Trouble.NO_CAPACITY
                ),
            ],
            beat_s=at(40),
        ),
        40,
        ["wait"],
    ),
    (
        "after a probe in vain: later again",
        E,
        seen(
            UP_ON_1,
            provisions=[
                ON_1,
                dataclasses.replace(
                    it.probe_provision(asked=18), ended_s=at(35), trouble=Trouble.NO_CAPACITY
                ),
            ],
            beat_s=at(51),
        ),
        51,
        ["probe 1 spot us-a #3"],
    ),
    (
        "three are missing: a probe for three",
        it.ELASTIC_4,
        seen(UP_ON_1, provisions=[ON_1], beat_s=at(17)),
        18,
        ["probe 3 spot us-a #2"],
    ),
    (
        "three could not be had: for two",
        it.ELASTIC_4,
        seen(
            UP_ON_1,
            provisions=[
                ON_1,
                dataclasses.replace(
                    it.probe_provision(asked=18), num_slices=3, ended_s=at(35), trouble=Trouble.NO_CAPACITY
                ),
            ],
            beat_s=at(51),
        ),
        51,
        ["probe 2 spot us-a #3"],
    ),
    (
        "moving, but taken away meanwhile: removed",
        E,
        seen(machines(P.LOST, "SUSPENDED", num_slices=1), provisions=[ON_1], stop=it.stop(20, resumes=True)),
        21,
        ["delete run-x PREEMPTED"],
    ),
    (
        "the probe of a dead supervisor: asked again",
        E,
        seen(UP_ON_1, provisions=[ON_1, it.probe_provision(asked=18, is_created=False)], beat_s=at(18)),
        18,
        ["probe 1 spot us-a #2"],
    ),
]
EJ = it.ELASTIC_JOBSET
JOB_1 = dataclasses.replace(JOB, num_slices=1)
JOB_LEDGER_1 = dataclasses.replace(JOB_LEDGER, num_slices=1)
JOBSETS: list[Row] = [
    ("a launched JobSet: adopted", J, seen(JOB), 1, ["note #1 ready"]),
    ("running: JobSet restarts it", J, seen(JOB, provisions=[JOB_LEDGER], ends=[LOST] * 9), 500, ["wait"]),
    (
        "restarting: nothing",
        J,
        seen(dataclasses.replace(JOB, phase=P.DEGRADED), provisions=[JOB_LEDGER]),
        500,
        ["wait"],
    ),
    (
        "a bad host: named",
        J,
        seen(JOB, provisions=[JOB_LEDGER], failing_machines=["n1", "n1"]),
        5,
        ["say", "wait"],
    ),
    (
        "over and complete: closed, left there",
        J,
        seen(dataclasses.replace(JOB, phase=P.OVER), provisions=[JOB_LEDGER], ends=[DONE]),
        6,
        ["close #1 REPLACED"],
    ),
    (
        "over and complete: the end",
        J,
        seen(
            dataclasses.replace(JOB, phase=P.OVER),
            provisions=[dataclasses.replace(JOB_LEDGER, ended_s=at(6), trouble=Trouble.REPLACED)],
            ends=[DONE],
        ),
        6,
        ["finish 0"],
    ),
    (
        "over, never supervised: the end",
        J,
        seen(dataclasses.replace(JOB, phase=P.OVER), ends=[FAILED]),
        6,
        ["finish 1"],
    ),
    (
        "over without an attempt: infrastructure",
        J,
        seen(dataclasses.replace(JOB, phase=P.OVER)),
        6,
        ["finish 75"],
    ),
    (
        "over before this launch: replaced",
        J,
        seen(dataclasses.replace(JOB, phase=P.OVER, created_s=at(-60))),
        0,
        ["create 2 spot default #1"],
    ),
    (
        "the deadline of a JobSet: ask to stop",
        dataclasses.replace(J, deadline_s=at(60)),
        seen(JOB, provisions=[JOB_LEDGER], attempt=it.attempt(), is_held=True),
        61,
        ["ask to stop"],
    ),
    (
        "stopped: the JobSet is removed",
        J,
        seen(JOB, provisions=[JOB_LEDGER], ends=[GONE], stop=it.stop(10)),
        11,
        ["delete run-x REPLACED"],
    ),
    (
        "pending, room for one of two: give up",
        EJ,
        seen(
            dataclasses.replace(JOB, phase=P.WAITING),
            provisions=[dataclasses.replace(JOB_LEDGER, ready_s=None)],
            room=1,
        ),
        16,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "was up, a node is gone, room for one of two: give up",
        EJ,
        seen(dataclasses.replace(JOB, phase=P.WAITING), provisions=[JOB_LEDGER], room=1),
        16,
        ["delete run-x NO_CAPACITY"],
    ),
    (
        "was up, a node is gone, too early: wait",
        EJ,
        seen(dataclasses.replace(JOB, phase=P.DEGRADED), provisions=[JOB_LEDGER], room=1),
        14,
        ["wait"],
    ),
    (
        "was up, a node is gone and is back: wait",
        EJ,
        seen(dataclasses.replace(JOB, phase=P.STARTING), provisions=[JOB_LEDGER], room=2),
        16,
        ["wait"],
    ),
    (
        "pending, room for none: wait",
        EJ,
        seen(
            dataclasses.replace(JOB, phase=P.WAITING),
            provisions=[dataclasses.replace(JOB_LEDGER, ready_s=None)],
            room=0,
        ),
        16,
        ["wait"],
    ),
    ("room for one: one", EJ, seen(room=1), 16, ["create 1 spot default #1"]),
    ("on one, room for two: move", EJ, seen(JOB_1, provisions=[JOB_LEDGER_1], room=2), 16, ["ask to move"]),
    ("on one, room for two, too early", EJ, seen(JOB_1, provisions=[JOB_LEDGER_1], room=2), 14, ["wait"]),
    ("on one, room for one: stay", EJ, seen(JOB_1, provisions=[JOB_LEDGER_1], room=1), 99, ["wait"]),
]
ROWS = [*BEGINNING, *QUEUED, *NEXT, *RUNNING, *PREEMPTION, *ENDS, *STOPS, *LIMITS, *GROWING, *JOBSETS]


@pytest.mark.parametrize(
    ("wanted", "observation", "minutes", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_table(wanted: Wanted, observation: Observation, minutes: float, expected: list[str]) -> None:
    assert [it.told(action) for action in decide(wanted, observation, at(minutes))] == expected


def test_the_table_is_long_and_without_doubles() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 120


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("there", ["queued", "ready", "doomed", "unaccounted"])
@pytest.mark.parametrize("end", ["none", "complete", "stop", "deadline"])
def test_something_always_follows_and_nothing_is_doubled(phase: Phase, there: str, end: str) -> None:
    """Whatever is there: there is an action, and never a new set beside another."""
    ledger = {
        "queued": [provision()],
        "ready": [provision(ready=2)],
        "doomed": [provision(ready=2, trouble=Trouble.PREEMPTED)],
        "unaccounted": [],
    }[there]
    observation = seen(
        machines(phase),
        provisions=ledger,
        ends=[DONE] if end == "complete" else [],
        stop=it.stop(3) if end == "stop" else None,
    )
    wanted = DEADLINE if end == "deadline" else F
    actions = [it.told(action) for action in decide(wanted, observation, at(61))]
    assert actions
    if phase is not Phase.OVER:
        assert not any(action.startswith(("create", "finish")) for action in actions)
