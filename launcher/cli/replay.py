"""``muster replay RUN --name NEW``: a run again as a new one, from what it recorded."""

from __future__ import annotations

import dataclasses
import shlex
import typing

import click

from launcher.cli import output, runs
from recipes.errors import UserError

if typing.TYPE_CHECKING:
    from launcher.replay import Replay
    from recipes.schema import Recipe


@click.command()
@runs.run_argument
@runs.root_option
@click.option("--name", metavar="NEW", required=True, help="Name of the new run, in the same root.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; Ctrl-C lets it go on.")
@click.option("--yes", "assume_yes", is_flag=True, help="Launch above target.max_chips or max_cost unasked.")
@click.option("--dry-run", is_flag=True, help="Print the plan and touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="What was submitted, as JSON on stdout.")
def command(
    run: str, root: str, name: str, wait: bool, assume_yes: bool, dry_run: bool, as_json: bool
) -> None:
    """Launch RUN (a name, a path or a gs:// address) again as the run NEW.

    Recipe, code and image are those that RUN recorded when it was created; nothing of the working folder
    is used. NEW begins at step 0.
    """
    from launcher.plan import make_plan
    from launcher.replay import replayable

    found = runs.find_run(run, root)
    replay = replayable(found, name)
    recipe = as_launched(replay)
    if recipe.target.kind != "gke":
        raise UserError(
            f"target.kind={recipe.target.kind}: only runs on a cluster are launched from their lock",
            hint=f"launch {found.url}/recipe.yaml with run.name={name}",
        )
    plan = make_plan(recipe)
    if dry_run:
        output.data(plan.to_json().rstrip("\n"))
        return
    from launcher.cli import launch_gke  # its imports are for those who need them

    asked = launch_gke.GkeLaunch(
        recipe=recipe,
        plan=plan,
        again=shlex.join(["muster", "replay", found.url, "--name", name]),
        sent=None if replay.bundle is None else replay.lock["code"],
        assume_yes=assume_yes,
        wait=wait,
        as_json=as_json,
    )
    click.get_current_context().exit(int(launch_gke.launch(asked)))


def as_launched(replay: Replay) -> Recipe:
    """The recipe with the image of the lock, and without the working tree where the image has the code."""
    target = dataclasses.replace(
        replay.recipe.target,
        image=replay.image or replay.recipe.target.image,
        ship_code=replay.bundle is not None,
    )
    return dataclasses.replace(replay.recipe, target=target)
