"""``muster plan``: what a launch would do, from the recipe alone. Touches nothing, needs no login."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

import click

from launcher.cli import output
from launcher.cli.arguments import compose_recipe, json_option, recipe_arguments
from recipes.errors import RecipeError, UserError

if typing.TYPE_CHECKING:
    from launcher.compose import Composed


@click.command("plan")
@recipe_arguments()
@json_option
@click.option("--manifest", "as_manifest", is_flag=True, help="Print the JobSet or queued resource itself.")
def command(
    recipe: str, overrides: Sequence[str], search: Sequence[Path], as_json: bool, as_manifest: bool
) -> None:
    """Show what a launch would do, touching nothing."""
    from launcher.plan import make_plan, render_plan

    if as_json and as_manifest:
        raise UserError("--json and --manifest exclude each other", hint="give one of them")
    composed = compose_recipe(recipe, overrides, search)
    if as_manifest:
        output.data_as_it_is(_manifest(composed).decode("ascii").rstrip("\n"))
        return
    plan = make_plan(composed.recipe)
    output.data(plan.to_json().rstrip("\n") if as_json else render_plan(plan).rstrip("\n"))


def _manifest(composed: Composed) -> bytes:
    """Byte for byte what a launch from this folder would apply.

    Raises:
      UserError: another target, or no JobSet that could run.
    """
    from launcher.bundle import left_out, make_bundle
    from launcher.manifest import target_manifest
    from recipes.check_target import launch_problems

    recipe, kind = composed.recipe, composed.recipe.target.kind
    if kind == "local":
        raise UserError(
            f"target.kind={kind}: only runs elsewhere have a manifest",
            hint="add target=gke or target=tpu, or leave --manifest out",
        )
    if lacking := launch_problems(recipe, origins=composed.origins):
        raise RecipeError(recipe.name, lacking)
    bundle = make_bundle(Path.cwd()) if recipe.target.ship_code else None
    for line in left_out(bundle.skipped if bundle else ()):
        output.note(line)
    return target_manifest(recipe, bundle=bundle.digest if bundle else None)
