"""``run.deadline``: a moment, written with its time zone."""

from __future__ import annotations

import datetime


def parse_deadline(text: str) -> float:
    """Unix seconds of an ISO 8601 time with a zone, for example ``2027-01-31T18:00Z``.

    Raises:
      ValueError: it is something else; the message says what.
    """
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is not a date and time") from None
    if moment.tzinfo is None:
        raise ValueError("has no time zone")
    return moment.timestamp()
