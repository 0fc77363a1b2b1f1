"""One measured figure, the arithmetic between runs, and the table that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    """``s``, ``ms`` or ``x`` (a ratio)."""
    low: float
    high: float
    """Over the rounds that ``value`` sums up."""
    aim: float | None = None
    """What ``value`` should not exceed."""
    note: str = ""

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return _number(self.value, self.unit) + (f" {self.unit}" if self.unit != "x" else "")


def summary(
    name: str, unit: str, values: Sequence[float], *, aim: float | None = None, note: str = ""
) -> Figure:
    """The median of ``values`` with the least and the greatest."""
    middle = statistics.median(values)
    return Figure(name=name, value=middle, unit=unit, low=min(values), high=max(values), aim=aim, note=note)


def best(name: str, unit: str, values: Sequence[float], *, aim: float | None = None) -> Figure:
    """The least of ``values``: what the work itself takes when nobody disturbs it."""
    note = f"best of {len(values)}"
    return Figure(
        name=name, value=min(values), unit=unit, low=min(values), high=max(values), aim=aim, note=note
    )


def ratio_of_bests(name: str, values: Sequence[float], others: Sequence[float]) -> Figure:
    """The least of ``values`` over the least of ``others``; low and high are of runs side by side."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    least = min(values) / min(others)
    return Figure(name=name, value=least, unit="x", low=min(ratios), high=max(ratios), note="best over best")


def abba(num_rounds: int) -> str:
    """The order of runs A and B in which a drift of the machine falls on both alike."""
    return "ABBA" * num_rounds


def round_ratios(order: str, medians: Sequence[float]) -> list[float]:
    """Mean of A over mean of B for each four runs of ``order``."""
    ratios = []
    for start in range(0, len(order), 4):
        four = list(zip(order[start : start + 4], medians[start : start + 4], strict=True))
        means = [statistics.fmean(value for who, value in four if who == which) for which in "AB"]
        ratios.append(means[0] / means[1])
    return ratios


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    lines = ["| figure | value | spread | aim | |", "|---|---:|---:|---:|---|"]
    for each in figures:
        aim = "" if each.aim is None else f"<= {_number(each.aim, each.unit)}"
        spread = f"{_number(each.low, each.unit)} to {_number(each.high, each.unit)}"
        lines.append(f"| {each.name} | {each.shown} | {spread} | {aim} | {each.note} |")
    return "\n".join(lines)


def _number(value: float, unit: str) -> str:
    decimals = {"x": 3, "s": 2, "ms": 0}[unit]
    return f"{value:.{decimals}f}"
