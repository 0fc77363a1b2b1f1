"""When a run has to stop, whatever it has reached: its deadline and its budget."""

from __future__ import annotations

import datetime

from recipes.deadline import parse_deadline
from recipes.errors import UserError
from recipes.schema import Recipe


def reached(
    *, now: float, spent_usd: float | None, deadline_s: float | None, max_cost_usd: float | None
) -> str | None:
    """Why the run has to stop now, in a sentence; None while it need not.

    Args:
      now: Unix time.
      spent_usd: so far; None when no price is known.
      deadline_s: Unix time; None for none.
      max_cost_usd: None for none.
    """
    if deadline_s is not None and now >= deadline_s:
        return f"run.deadline={_date(deadline_s)} is reached"
    if max_cost_usd is not None and spent_usd is not None and spent_usd >= max_cost_usd:
        return f"USD {spent_usd:,.2f} of run.max_cost={max_cost_usd:g} are spent"
    return None


def refuse_passed_deadline(recipe: Recipe, now: float) -> None:
    """Raises UserError when the run would have to stop at once."""
    text = recipe.run.deadline
    if text is not None and now >= parse_deadline(text):
        raise UserError(
            f"run.deadline={text} has passed", hint="give a later one, or run.deadline=null for none"
        )


def _date(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
