"""``target.fallbacks``: where else, and how else, machines may be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.elastic import possible_slices
from recipes.schema import Recipe
from recipes.schema_target import Capacity

CAPACITIES: Sequence[Capacity] = ("on_demand", "spot", "reserved")
"""Those that queued resources have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to get machines."""

    zone: str
    """Of TPU VMs; empty on a cluster."""
    capacity: Capacity
    num_slices: int


def parse_fallback(text: str, *, zone: str, capacity: Capacity) -> tuple[str, Capacity]:
    """Zone and capacity of ``ZONE/CAPACITY``, ``ZONE`` or ``/CAPACITY``.

    Raises:
      ValueError: it is none of these.
    """
    found_zone, slash, word = text.partition("/")
    known = [each for each in CAPACITIES if each == word]
    if not text or (slash and not known):
        raise ValueError(f"{text!r} is not ZONE/CAPACITY")
    return found_zone or zone, known[0] if known else capacity


def choices(recipe: Recipe) -> Sequence[Choice]:
    """Best first: every zone and capacity with all slices, then the same with fewer."""
    target = recipe.target
    is_tpu = target.kind == "tpu"
    zone, capacity = (target.zone or "") if is_tpu else "", target.capacity
    fallbacks = target.fallbacks if is_tpu else ()
    places = [(zone, capacity), *(parse_fallback(text, zone=zone, capacity=capacity) for text in fallbacks)]
    return [
        Choice(zone=zone, capacity=capacity, num_slices=number)
        for number in possible_slices(recipe)
        for zone, capacity in dict.fromkeys(places)
    ]
