"""What Ctrl-C leaves running, in each phase of a launch that is supervised in the foreground."""

from __future__ import annotations

import pytest

from launcher.cli.supervising import left_behind
from launcher.rundir import RunDir
from launcher.storage import open_storage
from launcher.supervise.observation import Observation, Phase
from tests.unit import supervised as it
from tests.unit.supervised import machines, provision, seen

NOBODY = "nobody brings it back after a preemption, or removes it at the end"
PHASES: list[tuple[str, Observation | None, list[str]]] = [
    ("before the first look", None, ["no machines are asked for"]),
    ("nothing asked for yet", seen(), ["no machines are asked for"]),
    (
        "queued",
        seen(machines(Phase.WAITING, "WAITING_FOR_RESOURCES"), provisions=[provision()]),
        ["run-x in projects/p/locations/us-a (WAITING_FOR_RESOURCES)", NOBODY],
    ),
    (
        "up",
        seen(machines(Phase.UP, "ACTIVE"), provisions=[provision(ready=2)]),
        ["run-x in projects/p/locations/us-a (ACTIVE)", "USD 16.00 an hour until it is deleted", NOBODY],
    ),
    (
        "being taken away",
        seen(machines(Phase.LEAVING, "SUSPENDING"), provisions=[provision(ready=2)]),
        ["(SUSPENDING)", NOBODY],
    ),
    (
        "with a probe",
        seen(
            machines(Phase.UP, "ACTIVE"), it.probe(Phase.WAITING, "ACCEPTED"), provisions=[provision(ready=2)]
        ),
        ["run-x-probe", "(ACCEPTED)"],
    ),
    (
        "a JobSet",
        seen(machines(Phase.UP, "running", place="ctx/default"), provisions=[]),
        ["run-x in ctx/default (running)", "JobSet restarts it; nobody heeds its deadline"],
    ),
]


@pytest.mark.parametrize(("observation", "says"), [row[1:] for row in PHASES], ids=[row[0] for row in PHASES])
def test_says_what_stays_and_how_to_stop_it(observation: Observation | None, says: list[str]) -> None:
    run = RunDir(open_storage("/runs/mine"))
    text = "\n".join(left_behind(run, observation))
    for part in (*says, "muster supervise /runs/mine", "muster stop /runs/mine"):
        assert part in text, text
