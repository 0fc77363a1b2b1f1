"""What a run costs, and what is said of its machines, as tables."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.books import spans
from launcher.cost import Cost, Span, of_attempts, of_provisions, per_hour, spent
from launcher.ledger import AttemptEnd, AttemptStart
from launcher.standing import short_place, standing
from launcher.supervise.records import Provision, Trouble

NOW = 1_800_000_000.0
ZONE = "projects/p/locations/us-west4-a"


def provision(
    number: int = 1, *, ready: float | None = None, ended: float | None = None, usd: float | None = 8.0
) -> Provision:
    """Times are hours before NOW; it was asked for an hour before it was ready, or two hours ago."""
    asked = 2.0 if ready is None else ready + 1
    return Provision(
        number=number,
        order="o1",
        place=ZONE,
        capacity="spot",
        num_slices=2,
        is_probe=False,
        name="run-1a2b3c",
        num_chips=8,
        usd_per_hour=usd,
        requested_s=NOW - 3600 * asked,
        is_created=True,
        ready_s=None if ready is None else NOW - 3600 * ready,
        ended_s=None if ended is None else NOW - 3600 * ended,
    )


@pytest.mark.parametrize(
    ("provisions", "hourly", "total"),
    [
        ([], 0.0, 0.0),
        ([provision()], 0.0, 0.0),
        ([provision(ready=3)], 8.0, 24.0),
        ([provision(ready=3, ended=1)], 0.0, 16.0),
        ([provision(ready=3, ended=2), provision(2, ready=1, usd=4.0)], 4.0, 12.0),
        ([provision(ready=3, usd=None)], None, None),
        ([provision(ready=3, ended=2, usd=None), provision(2, ready=1)], 8.0, None),
        ([provision(usd=None), provision(2, ready=1)], 8.0, 8.0),
        # A clock that was wrong takes nothing back.
        ([provision(ready=-1)], 8.0, 0.0),
    ],
)
def test_machines(provisions: list[Provision], hourly: float | None, total: float | None) -> None:
    assert (per_hour(provisions), spent(provisions, NOW)) == (hourly, total)


@pytest.mark.parametrize(
    ("steps_left", "step_time_s", "usd", "finish", "hours"),
    [
        (3600, 2.0, 8.0, 16.0, 2.0),
        (0, 2.0, 8.0, 0.0, 0.0),
        (-1, 2.0, 8.0, 0.0, 0.0),
        (3600, None, 8.0, None, None),
        (3600, 2.0, None, None, 2.0),
    ],
)
def test_to_finish(
    steps_left: int, step_time_s: float | None, usd: float | None, finish: float | None, hours: float | None
) -> None:
    gone = provision(ready=2, ended=1, usd=usd)
    found = of_provisions([gone], NOW, steps_left=steps_left, step_time_s=step_time_s, price_source="list")
    assert (found.to_finish_usd, found.to_finish_hours, found.price_source) == (finish, hours, "list")


def test_the_newest_machines_are_no_probe() -> None:
    probe = dataclasses.replace(provision(2, usd=1.0), is_probe=True)
    found = of_provisions(
        [provision(ready=1), probe], NOW, steps_left=3600, step_time_s=1.0, price_source=None
    )
    assert found.to_finish_usd == 8.0


def test_attempts() -> None:
    over, live = Span(start_s=0.0, end_s=3600.0), Span(start_s=7200.0, end_s=9000.0, is_open=True)
    found = of_attempts([over, live], usd_per_hour=8.0, steps_left=0, step_time_s=None, price_source="list")
    assert found == Cost(usd_per_hour=8.0, spent_usd=12.0, price_source="list")
    found = of_attempts([over], usd_per_hour=8.0, steps_left=0, step_time_s=None, price_source=None)
    assert (found.usd_per_hour, found.spent_usd) == (0.0, 8.0)


def start(number: int, time_s: float) -> AttemptStart:
    return AttemptStart(attempt=number, started_s=time_s, hosts=(), from_step=-1, lock={})


def end(time_s: float) -> AttemptEnd:
    return AttemptEnd(
        end_s=time_s, exit_code=75, first_failing_host=None, message="", hint="", from_step=-1, to_step=-1
    )


@pytest.mark.parametrize(
    ("ends", "held", "beat", "expected"),
    [
        ([end(20.0), end(50.0)], None, 49.0, [(10.0, 20.0, False), (30.0, 50.0, False)]),
        ([end(20.0), None], 60.0, 49.0, [(10.0, 20.0, False), (30.0, 60.0, True)]),
        ([end(20.0), None], None, 49.0, [(10.0, 20.0, False), (30.0, 49.0, False)]),
        ([end(20.0), None], None, None, [(10.0, 20.0, False), (30.0, 30.0, False)]),
        ([None, end(50.0)], None, 49.0, [(10.0, 30.0, False), (30.0, 50.0, False)]),
        ([end(20.0), end(50.0)], 60.0, 49.0, [(10.0, 20.0, False), (30.0, 50.0, False)]),
    ],
)
def test_spans(
    ends: list[AttemptEnd | None],
    held: float | None,
    beat: float | None,
    expected: list[tuple[float, float, bool]],
) -> None:
    found = spans([start(1, 10.0), start(2, 30.0)], ends, held, beat)
    assert [(each.start_s, each.end_s, each.is_open) for each in found] == expected


def test_an_attempt_that_never_began_costs_nothing() -> None:
    assert [each.start_s for each in spans([None, start(2, 30.0)], [None, None], 60.0, None)] == [30.0]


LOST = dataclasses.replace(
    provision(ready=3, ended=1), trouble=Trouble.PREEMPTED, code="SUSPENDED", why="gone"
)
FULL = dataclasses.replace(
    provision(ended=1), trouble=Trouble.NO_CAPACITY, code="RESOURCE_EXHAUSTED", why="no chips"
)


@pytest.mark.parametrize(
    ("provisions", "supervised", "sentence"),
    [
        ([], True, ""),
        ([provision(ready=1)], True, ""),
        ([provision()], True, "waiting for spot capacity in us-west4-a for 120 min"),
        (
            [dataclasses.replace(provision(), is_created=False)],
            True,
            "asking for spot capacity in us-west4-a for 120 min",
        ),
        (
            [FULL, provision(2)],
            True,
            "waiting for spot capacity in us-west4-a for 120 min; before that: no chips (RESOURCE_EXHAUSTED)",
        ),
        ([LOST], True, "preempted in us-west4-a at 2027-01-15 07:00 UTC, being replaced (SUSPENDED)"),
        ([LOST], False, "preempted in us-west4-a at 2027-01-15 07:00 UTC (SUSPENDED)"),
        ([FULL], False, "no chips (RESOURCE_EXHAUSTED)"),
        (
            [dataclasses.replace(LOST, ended_s=None)],
            True,
            "gone (SUSPENDED); run-1a2b3c is being removed",
        ),
        ([provision(ready=1), dataclasses.replace(provision(2), is_probe=True)], True, ""),
    ],
)
def test_why_there_are_no_machines(provisions: list[Provision], supervised: bool, sentence: str) -> None:
    assert standing(provisions, NOW, is_supervised=supervised).why_not == sentence


def test_where_they_are() -> None:
    found = standing([LOST, provision(2, ready=1)], NOW, is_supervised=True)
    assert (found.provision, found.num_provisions, found.up_since_s) == (2, 2, NOW - 3600)
    assert (found.gone_s, found.trouble) == (None, None)
    assert [short_place(ZONE), short_place("ctx/ns")] == ["us-west4-a", "ctx/ns"]
