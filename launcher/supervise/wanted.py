"""An order and its recipe -> what is to be kept running, for ``decide``."""

from __future__ import annotations

from launcher.plan import option_plan
from launcher.supervise.observation import Option, Wanted
from launcher.supervise.records import Order
from recipes.deadline import parse_deadline
from recipes.elastic import possible_slices
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
        options=[_option(recipe, each) for each in choices(recipe)],
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


def _option(recipe: Recipe, choice: Choice) -> Option:
    is_tpu = recipe.target.kind == "tpu"
    found = option_plan(recipe, choice)
    return Option(
        place=zone_place(recipe.target.project, choice.zone) if is_tpu else cluster_place(recipe),
        capacity=found.capacity,
        num_slices=found.num_slices,
        num_chips=found.num_chips,
        usd_per_hour=found.usd_per_hour,
    )
