"""Rows of the table of ``decide``: how machines come, are and go (see test_decide.py)."""

from __future__ import annotations

import dataclasses

from launcher.supervise.records import Trouble
from tests.unit import supervised as it
from tests.unit.decide_scenes import LOST, ON_1, UP, E, F, P, Row, W, gone
from tests.unit.supervised import A, B, at, machines, provision, seen

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
