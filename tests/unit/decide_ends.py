"""Rows of the table of ``decide``: ends, stops, limits, growing and JobSets (see test_decide.py)."""

from __future__ import annotations

import dataclasses

from launcher.supervise.records import Trouble
from tests.unit import supervised as it
from tests.unit.decide_scenes import (
    BAD,
    DONE,
    FAILED,
    GONE,
    JOB,
    JOB_LEDGER,
    LOST,
    ON_1,
    STUCK,
    UP,
    UP_ON_1,
    E,
    J,
    P,
    Row,
    W,
    gone,
)
from tests.unit.supervised import A, at, machines, provision, seen

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
    (
        "stopped and over: stopped",
        J,
        seen(dataclasses.replace(JOB, phase=P.OVER), ends=[GONE], stop=it.stop(5)),
        6,
        ["finish 42"],
    ),
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
