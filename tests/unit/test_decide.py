"""``decide``: what is done about a run, row by row. Minutes count from the launch (see supervised.py)."""

from __future__ import annotations

import pytest

from launcher.supervise.decide import decide
from launcher.supervise.observation import Observation, Phase, Wanted
from launcher.supervise.records import Trouble
from tests.unit import decide_ends, decide_machines
from tests.unit import supervised as it
from tests.unit.decide_scenes import DONE, F
from tests.unit.supervised import at, machines, provision, seen

ROWS = [
    *decide_machines.BEGINNING,
    *decide_machines.QUEUED,
    *decide_machines.NEXT,
    *decide_machines.RUNNING,
    *decide_machines.PREEMPTION,
    *decide_ends.ENDS,
    *decide_ends.STOPS,
    *decide_ends.LIMITS,
    *decide_ends.GROWING,
    *decide_ends.JOBSETS,
]


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
    wanted = decide_ends.DEADLINE if end == "deadline" else F
    actions = [it.told(action) for action in decide(wanted, observation, at(61))]
    assert actions
    if phase is not Phase.OVER:
        assert not any(action.startswith(("create", "finish")) for action in actions)
