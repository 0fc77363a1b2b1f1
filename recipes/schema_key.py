"""What every key of the schema carries besides its type: meaning, bounds, and what changing it changes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any


class Effect(enum.StrEnum):
    """What changing a key does to a run that has already begun."""

    EXPERIMENT = "changes the experiment"
    """Another experiment: refused on an existing run."""
    SPEED = "safe: same experiment, losses equal up to rounding"
    OPERATION = "safe: does not touch the numbers"


def spec(
    doc: str,
    effect: Effect = Effect.EXPERIMENT,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Mapping[str, Any]:
    """Metadata of one key: meaning (with its unit), effect and bounds (``above`` is exclusive)."""
    return {"doc": doc, "effect": effect, "minimum": minimum, "maximum": maximum, "above": above}
