"""What a run costs: an hour, so far, and to its end. Pure arithmetic over its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.supervise.records import Provision

HOUR_S = 3600.0


def spent(provisions: Sequence[Provision], now: float) -> float | None:
    """USD for all machines, from when they were up to when they were gone.

    Args:
      provisions: the run's ledger.
      now: Unix time.

    Returns:
      None when machines were up of which no price is known.
    """
    total = 0.0
    for each in provisions:
        if each.ready_s is None:
            continue
        if each.usd_per_hour is None:
            return None
        hours = max(0.0, (each.ended_s or now) - each.ready_s) / HOUR_S
        total += hours * each.usd_per_hour
    return total


def per_hour(provisions: Sequence[Provision]) -> float | None:
    """USD an hour for the machines that are up now; None when no price is known."""
    up = [each.usd_per_hour for each in provisions if each.ready_s is not None and each.ended_s is None]
    return None if any(price is None for price in up) else sum(price or 0.0 for price in up)


def to_finish(*, steps_left: int, step_time_s: float | None, usd_per_hour: float | None) -> float | None:
    """USD until the last step at the present speed; None when speed or price are unknown."""
    if step_time_s is None or usd_per_hour is None:
        return None
    return steps_left * step_time_s / HOUR_S * usd_per_hour
