"""What a supervisor keeps of a run, read back for people: machines, who supervises, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from launcher import lease
from launcher.cost import Cost, Span, of_attempts, of_provisions
from launcher.ledger import AttemptEnd, AttemptStart, Damaged
from launcher.plan import price_of
from launcher.rundir import READERS, RunDir
from launcher.storage_types import Names
from launcher.supervise.records import Provision
from recipes.contract import RunPath
from recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Books:
    """Of one run at one moment."""

    has_order: bool
    provisions: Sequence[Provision]
    supervisor: str | None
    """Who gets machines for it; None: nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How far a run is."""

    attempts: Sequence[int]
    is_held: bool
    """The newest attempt is under way."""
    beat_s: float | None
    """Newest sign of life (Unix time)."""
    steps_left: int
    step_time_s: float | None


def read_books(run: RunDir, now: float, damaged: Names, overseer: str | None) -> Books:
    """Reads them; one listing when there are none.

    Args:
      run: where they are.
      now: Unix time.
      damaged: gets a line for what cannot be read.
      overseer: who supervises all runs of the folder.
    """
    names = run.storage.children()
    held = None
    if RunPath.SUPERVISOR in names:
        try:
            held = lease.read(run.storage, RunPath.SUPERVISOR)
        except Damaged as error:
            damaged.append(error.message)
    own = held.holder() if held is not None and lease.is_held(held, now) else None
    has_order = RunPath.ORDER in names
    return Books(
        has_order=has_order,
        provisions=run.provisions(damaged) if RunPath.PROVISIONS in names else (),
        supervisor=own or (overseer if has_order else None),
    )


def cost_of(run: RunDir, recipe: Recipe, books: Books, pace: Pace, now: float) -> Cost:
    """By the ledger of machines or, without one, by how long the attempts took at the recipe's price."""
    price = price_of(recipe)
    source = price.source if price else None
    if books.provisions:
        return of_provisions(
            books.provisions,
            now,
            steps_left=pace.steps_left,
            step_time_s=pace.step_time_s,
            price_source=source,
        )
    if price is None:
        return Cost()
    return of_attempts(
        _spans(run, pace, now),
        usd_per_hour=price.usd_per_hour,
        steps_left=pace.steps_left,
        step_time_s=pace.step_time_s,
        price_source=source,
    )


def _spans(run: RunDir, pace: Pace, now: float) -> Sequence[Span]:
    if not pace.attempts:
        return []
    with ThreadPoolExecutor(min(READERS, len(pace.attempts))) as pool:
        starts = list(pool.map(run.attempt_start, pace.attempts))
        ends = list(pool.map(lambda number: run.attempt_end(number, []), pace.attempts))
    return spans(starts, ends, now if pace.is_held else None, pace.beat_s)


def spans(
    starts: Sequence[AttemptStart | None],
    ends: Sequence[AttemptEnd | None],
    held_until_s: float | None,
    beat_s: float | None,
) -> Sequence[Span]:
    """How long each attempt used machines.

    Args:
      starts: of all attempts, oldest first; None for one whose launcher died at once.
      ends: of the same; None for one without an end: it lasted to the next one at most.
      held_until_s: now, while the newest is under way.
      beat_s: the newest sign of life.
    """
    found: list[Span] = []
    limit_s = held_until_s or beat_s
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        if start is None:
            continue
        end_s = end.end_s if end else limit_s
        is_open = end is None and held_until_s is not None and not found
        found.append(Span(start_s=start.started_s, end_s=end_s or start.started_s, is_open=is_open))
        limit_s = start.started_s
    return found[::-1]
