"""An order and its recipe -> what is to be kept running, for ``decide``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.plan import price_of
from launcher.supervise.observation import Option, Wanted
from launcher.supervise.records import Order
from recipes.deadline import parse_deadline
from recipes.elastic import possible_slices, with_slices
from recipes.hardware import slice_shape
from recipes.options import Choice, choices
from recipes.schema import Recipe


def wanted(recipe: Recipe, order: Order, run: str) -> Wanted:
    """What the supervisor keeps running.

    Args:
      recipe: as launched, with all its slices.
      order: the launch.
      run: the run's name.
    """
    numbers, config = possible_slices(recipe), recipe.run
    return Wanted(
        run=run,
        order=order,
        options=_tpu_options(recipe) if recipe.target.kind == "tpu" else _cluster_options(recipe, numbers),
        num_slices=recipe.multislice.num_slices,
        is_elastic=len(numbers) > 1,
        restarts_itself=recipe.target.kind == "gke",
        max_restarts=config.max_restarts,
        max_attempts_without_progress=config.max_attempts_without_progress,
        grace_period_s=recipe.target.grace_period_s,
        fallback_after_s=recipe.target.fallback_after_s,
        grow_after_s=recipe.multislice.grow_after_s,
        deadline_s=None if config.deadline is None else parse_deadline(config.deadline),
        max_cost_usd=config.max_cost,
    )


def zone_place(project: str | None, zone: str) -> str:
    """A zone as the Cloud TPU API names it."""
    return f"projects/{project}/locations/{zone}"


def cluster_place(recipe: Recipe) -> str:
    """A namespace of a cluster."""
    return f"{recipe.target.cluster or 'current'}/{recipe.target.namespace}"


def _tpu_options(recipe: Recipe) -> Sequence[Option]:
    return [_option(recipe, zone_place(recipe.target.project, each.zone), each) for each in choices(recipe)]


def _cluster_options(recipe: Recipe, numbers: Sequence[int]) -> Sequence[Option]:
    capacity, place = recipe.target.capacity, cluster_place(recipe)
    return [
        _option(recipe, place, Choice(zone="", capacity=capacity, num_slices=number)) for number in numbers
    ]


def _option(recipe: Recipe, place: str, choice: Choice) -> Option:
    effective = with_slices(recipe, choice.num_slices)
    target = dataclasses.replace(effective.target, capacity=choice.capacity)
    price = price_of(dataclasses.replace(effective, target=target))
    return Option(
        place=place,
        capacity=choice.capacity,
        num_slices=choice.num_slices,
        num_chips=choice.num_slices * slice_shape(recipe.hardware).num_chips,
        usd_per_hour=price.usd_per_hour if price else None,
    )
