"""What a run costs: an hour, so far, and to its end. Pure arithmetic over its ledger, in USD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.supervise.records import Provision

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one run at one moment; each is None when it is not known."""

    usd_per_hour: float | None = None
    """For what is up now."""
    spent_usd: float | None = None
    to_finish_usd: float | None = None
    """At the present speed, on machines like the newest ones."""
    to_finish_hours: float | None = None
    price_source: str | None = None
    """Where the price of a chip comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From when to when an attempt used its machines (Unix time)."""

    start_s: float
    end_s: float
    is_open: bool = False
    """It still does."""


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
        ended_s = now if each.ended_s is None else each.ended_s
        total += max(0.0, ended_s - each.ready_s) / HOUR_S * each.usd_per_hour
    return total


def per_hour(provisions: Sequence[Provision]) -> float | None:
    """USD an hour for the machines that are up now; None when no price is known."""
    up = [each.usd_per_hour for each in provisions if each.ready_s is not None and each.ended_s is None]
    return None if any(price is None for price in up) else sum(price or 0.0 for price in up)


def to_finish(*, steps_left: int, step_time_s: float | None, usd_per_hour: float | None) -> float | None:
    """USD until the last step at the present speed; None when speed or price are unknown."""
    hours = hours_to_finish(steps_left=steps_left, step_time_s=step_time_s)
    return None if hours is None or usd_per_hour is None else hours * usd_per_hour


def hours_to_finish(*, steps_left: int, step_time_s: float | None) -> float | None:
    """Hours of training until the last step; None when the speed is unknown."""
    return None if step_time_s is None else max(0, steps_left) * step_time_s / HOUR_S


def of_provisions(
    provisions: Sequence[Provision],
    now: float,
    *,
    steps_left: int,
    step_time_s: float | None,
    price_source: str | None,
) -> Cost:
    """Of a run whose machines are in its ledger."""
    real = [each.usd_per_hour for each in provisions if not each.is_probe]
    newest = real[-1] if real else None
    return Cost(
        usd_per_hour=per_hour(provisions),
        spent_usd=spent(provisions, now),
        to_finish_usd=to_finish(steps_left=steps_left, step_time_s=step_time_s, usd_per_hour=newest),
        to_finish_hours=hours_to_finish(steps_left=steps_left, step_time_s=step_time_s),
        price_source=price_source,
    )


def of_attempts(
    spans: Sequence[Span],
    *,
    usd_per_hour: float,
    steps_left: int,
    step_time_s: float | None,
    price_source: str | None,
) -> Cost:
    """Of a run without such a ledger: its machines cost something while its attempts last."""
    hours = sum(max(0.0, each.end_s - each.start_s) for each in spans) / HOUR_S
    return Cost(
        usd_per_hour=usd_per_hour if any(each.is_open for each in spans) else 0.0,
        spent_usd=hours * usd_per_hour,
        to_finish_usd=to_finish(steps_left=steps_left, step_time_s=step_time_s, usd_per_hour=usd_per_hour),
        to_finish_hours=hours_to_finish(steps_left=steps_left, step_time_s=step_time_s),
        price_source=price_source,
    )
