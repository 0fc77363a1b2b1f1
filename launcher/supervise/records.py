"""What the supervisor keeps in a run directory: the order it carries out, and every set of machines it got.

``order.json`` is written by each launch. ``provisions/NNNN.json`` is claimed (created) before anything is
asked of a cloud and rewritten as the machines come and go, so that whoever takes over knows as much.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """``order.json``: what is to be kept running. A new launch replaces it."""

    id: str
    """Of the launch; failures are counted over one order."""
    recipe: str
    """The launched recipe, relative to the run directory."""
    bundle: str | None
    """``sha256:<hex>`` of the code; None: the image has it."""
    launched_s: float
    by: str
    """Who launched it, for people."""


class Trouble(enum.StrEnum):
    """Why machines could not be had, or were taken away."""

    NO_CAPACITY = "no capacity"
    QUOTA = "quota"
    PERMISSION = "permission"
    RESERVATION = "reservation"
    BAD_REQUEST = "bad request"
    UNAVAILABLE = "service unavailable"
    """Of the API itself: it did not answer, or failed."""
    PREEMPTED = "preempted"
    """The machines were there and were taken away: not counted."""
    FAILED = "failed"
    """The machines are there and the run does not get going on them: counted."""
    REPLACED = "replaced"
    """Given back on purpose: to grow, or at the end."""


TERMINAL = (Trouble.PERMISSION, Trouble.BAD_REQUEST)
"""Asking again would be refused again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provision:
    """``provisions/NNNN.json``: one set of machines, from asking for it to having given it back."""

    number: int
    order: str
    place: str
    """``projects/P/locations/ZONE``, or ``CONTEXT/NAMESPACE`` of a cluster."""
    capacity: str
    num_slices: int
    is_probe: bool
    """Asked for only to learn whether there is capacity for more slices."""
    name: str
    """Of the queued resource or JobSet."""
    num_chips: int
    usd_per_hour: float | None
    """While the machines are up; None when no price is known."""
    requested_s: float
    is_created: bool = False
    """The service took the request (or it was seen there)."""
    ready_s: float | None = None
    """When all machines were up first."""
    ended_s: float | None = None
    """When nothing of it was left."""
    trouble: Trouble | None = None
    code: str = ""
    """The service's own word, for example RESOURCE_EXHAUSTED."""
    why: str = ""
    """For people."""
