"""``muster plan``: what a launch would do, from the recipe alone. Touches nothing, needs no login."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments


@click.command("plan")
@recipe_arguments()
@json_option
def command(recipe: str, overrides: Sequence[str], search: Sequence[Path], as_json: bool) -> None:
    """Show what a launch would do, touching nothing."""
    from launcher.plan import make_plan, render_plan

    plan = make_plan(compose_recipe(recipe, overrides, search).recipe)
    output.data(plan.to_json().rstrip("\n") if as_json else render_plan(plan).rstrip("\n"))
