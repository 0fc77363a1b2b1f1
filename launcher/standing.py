"""What the books say of a run's machines: where they are, since when, and why there are none.

From the run directory alone, so it can be said when the machines are gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir import RunDir, read_recipe
from launcher.supervise.records import Provision, Trouble


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The newest set of machines, and what is to be said of it; None and empty where there is nothing."""

    place: str | None = None
    capacity: str | None = None
    num_slices: int | None = None
    provision: int | None = None
    num_provisions: int = 0
    asked_s: float | None = None
    up_since_s: float | None = None
    """None: they are not up."""
    gone_s: float | None = None
    """When they were gone; None while they are there or asked for."""
    trouble: str | None = None
    code: str | None = None
    """The service's own word."""
    why_not: str = ""
    """Why the run has no machines to run on, in one sentence."""


def is_zone(place: str) -> bool:
    """Whether it is one of the Cloud TPU API, where nothing but a supervisor brings a run back."""
    return place.startswith("projects/") and "/locations/" in place


def short_place(place: str) -> str:
    """A zone's own name; another place as it is."""
    return place.rpartition("/")[2] if is_zone(place) else place


def open_provisions(run: RunDir) -> Sequence[Provision]:
    """Of TPU VMs, those that are not known to be gone."""
    return [each for each in run.provisions() if each.ended_s is None and is_zone(each.place)]


def is_on_vms(run: RunDir) -> bool:
    """Whether the newest launch was onto TPU VMs, or machines of an older one are still there."""
    newest = next(iter(run.launches()), None)
    if newest is not None and read_recipe(run.storage, newest).target.kind == "tpu":
        return True
    return bool(open_provisions(run))


def standing(provisions: Sequence[Provision], now: float, *, is_supervised: bool) -> Standing:
    """What the ledger says.

    Args:
      provisions: oldest first.
      now: Unix time.
      is_supervised: somebody gets machines for the run.
    """
    real = [each for each in provisions if not each.is_probe]
    if not real:
        return Standing()
    newest = real[-1]
    is_up = newest.ready_s is not None and newest.ended_s is None
    return Standing(
        place=newest.place,
        capacity=newest.capacity,
        num_slices=newest.num_slices,
        provision=newest.number,
        num_provisions=len(provisions),
        asked_s=newest.requested_s,
        up_since_s=newest.ready_s if is_up else None,
        gone_s=newest.ended_s,
        trouble=newest.trouble.value if newest.trouble else None,
        code=newest.code or None,
        why_not=_why_not(real, now, is_supervised=is_supervised),
    )


def _why_not(real: Sequence[Provision], now: float, *, is_supervised: bool) -> str:
    newest, zone = real[-1], short_place(real[-1].place)
    if newest.ended_s is None:
        if newest.trouble is not None:
            return f"{_reason(newest)}; {newest.name} is being removed"
        if newest.ready_s is not None:
            return ""
        what = "waiting for" if newest.is_created else "asking for"
        minutes = int(max(0.0, now - newest.requested_s) // 60)
        before = real[-2] if len(real) > 1 else None
        after = f"; before that: {_reason(before)}" if before is not None and before.trouble else ""
        return f"{what} {newest.capacity} capacity in {zone} for {minutes} min{after}"
    if newest.trouble is Trouble.PREEMPTED:
        then = ", being replaced" if is_supervised else ""
        return f"preempted in {zone} at {_clock(newest.ended_s)}{then}{_code(newest)}"
    return _reason(newest)


def _reason(provision: Provision) -> str:
    said = provision.why or (provision.trouble.value if provision.trouble else "given back")
    return f"{said}{_code(provision) if provision.code not in said else ''}"


def _code(provision: Provision) -> str:
    return f" ({provision.code})" if provision.code else ""


def _clock(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
