"""``muster replay RUN --name NEW``: a run again as a new one, from what it recorded."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Sequence

import click

from launcher.cli import output, runs
from launcher.cli.arguments import complete_override
from recipes.errors import UserError
from recipes.load import free_form_node, keys
from recipes.schema_key import Effect

if typing.TYPE_CHECKING:
    from launcher.replay import Replay
    from recipes.schema import Recipe


RECORDED = ("target.kind", "target.image", "target.ship_code")
"""A replay has those of the run."""


@click.command()
@runs.run_argument
@click.argument("overrides", nargs=-1, metavar="[target.KEY=VALUE]...", shell_complete=complete_override)
@runs.root_option
@click.option("--name", metavar="NEW", required=True, help="Name of the new run, in the same root.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; Ctrl-C lets it go on.")
@click.option("--yes", "assume_yes", is_flag=True, help="Launch above target.max_chips or max_cost unasked.")
@click.option("--dry-run", is_flag=True, help="Print the plan and touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="What was submitted, as JSON on stdout.")
def command(
    run: str,
    overrides: Sequence[str],
    root: str,
    name: str,
    wait: bool,
    assume_yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Launch RUN (a name, a path or a gs:// address) again as the run NEW.

    Recipe, code and image are those that RUN recorded when it was created; nothing of the working folder
    is used. NEW begins at step 0. Only where and how it is placed may be changed: keys of target.
    """
    _check_overrides(overrides)
    from launcher.plan import make_plan
    from launcher.replay import replayable

    found = runs.find_run(run, root)
    replay = replayable(found, name)
    recipe = as_launched(replay)
    if overrides:
        from launcher.compose import recompose  # imports Hydra

        recipe = recompose(recipe, overrides)
    if recipe.target.kind != "gke":
        raise UserError(
            f"target.kind={recipe.target.kind}: only runs on a cluster are launched from their lock",
            hint=f"launch {found.url}/recipe.yaml with run.name={name}",
        )
    plan = make_plan(recipe)
    if dry_run:
        output.data(plan.to_json().rstrip("\n"))
        return
    from launcher.cli import launch_gke, sending  # their imports are for those who need them

    asked = sending.Launch(
        recipe=recipe,
        plan=plan,
        again=shlex.join(["muster", "replay", found.url, "--name", name, *overrides]),
        sent=None if replay.bundle is None else replay.lock["code"],
        assume_yes=assume_yes,
        wait=wait,
        as_json=as_json,
    )
    click.get_current_context().exit(int(launch_gke.launch(asked)))


def _check_overrides(overrides: Sequence[str]) -> None:
    """Misspelt keys are told of by whoever reads them."""
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        known = keys().get(free_form_node(key) or key)
        is_safe = known is None or known.effect is Effect.OPERATION
        if not key.startswith("target.") or key in RECORDED or not is_safe:
            raise UserError(
                f"{key}: a replay has the recipe, code and image that were recorded",
                hint="only keys of target may be given, for example target.cluster=NAME;"
                " to change the experiment use `muster launch`",
            )


def as_launched(replay: Replay) -> Recipe:
    """The recipe with the image of the lock, and without the working tree where the image has the code."""
    target = dataclasses.replace(
        replay.recipe.target,
        image=replay.image or replay.recipe.target.image,
        ship_code=replay.bundle is not None,
    )
    return dataclasses.replace(replay.recipe, target=target)
